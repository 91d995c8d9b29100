"""Computes one scheduled batch: forward pass, sampling, and who gets which result. No state, no bookkeeping."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from common.engine.batch import ScheduledBatch, ScheduledChunk
from common.engine.sampler import SampleSpec, sample
from common.engine.sequence import Phase, SequenceState
from common.errors import MoerelayError
from common.model.batch import Chunk, Runner
from common.prompt_logprobs import PromptLogprobs, empty
from common.sampling import SampledToken


class ComputedChunk(NamedTuple):
    """One chunk and what it brought."""

    chunk: ScheduledChunk
    #: One per choice if the chunk ends a prompt, one if it is a decode, none otherwise.
    tokens: tuple[SampledToken, ...]
    #: Why there are no tokens.
    error: MoerelayError | None
    #: Those of the positions since the prompt's last chunk; None if there are none or nobody asked for them.
    prompt_logprobs: PromptLogprobs | None


def compute(
    runner: Runner, batch: ScheduledBatch, eos_token_ids: frozenset[int], weight_version: str
) -> list[ComputedChunk]:
    """The batch's chunks, in order. All first tokens of a prompt are sampled from one row of logits."""
    forwarded = [_as_chunk(c) for c in batch.chunks]
    output = runner.execute(forwarded)
    specs = [_specs(c, eos_token_ids, weight_version) for c in batch.chunks]
    sampled_from = [of_chunk for of_chunk in specs if of_chunk]
    results: Iterator[SampledToken | MoerelayError] = iter(())
    if sampled_from:
        rows = [row for row, of_row in enumerate(sampled_from) for _ in of_row]
        logits_NV = output.logits_NV if len(rows) == len(sampled_from) else output.logits_NV[rows]
        results = iter(sample(logits_NV, [spec for of_row in sampled_from for spec in of_row]))
    scores = iter(output.scores)
    return [
        _computed(scheduled, chunk, list(islice(results, len(of_chunk))), scores)
        for scheduled, chunk, of_chunk in zip(batch.chunks, forwarded, specs, strict=True)
    ]


def _as_chunk(scheduled: ScheduledChunk) -> Chunk:
    sequence, start, end, samples = scheduled
    num_top = _num_top(sequence)
    # The logits at a position tell the token after it; the one after the prompt is sampled, not scored.
    targets = () if num_top is None else sequence.request.prompt[start + 1 : end + 1]
    return Chunk(
        sequence.token_ids[start:end], start, sequence.blocks, samples, sequence.wants_rows, targets, num_top or 0
    )


def _num_top(sequence: SequenceState) -> int | None:
    """Alternatives told beside each prompt token; None when none of them is scored."""
    return sequence.request.sampling.prompt_logprobs if sequence.phase is Phase.PREFILLING else None


def _specs(scheduled: ScheduledChunk, eos_token_ids: frozenset[int], weight_version: str) -> list[SampleSpec]:
    """How the next token is sampled; after the prompt, that of every choice."""
    if not scheduled.samples:
        return []
    sequence, request = scheduled.sequence, scheduled.sequence.request
    is_first = sequence.num_generated == 0
    return [
        SampleSpec.of(
            request.sampling,
            eos_token_ids,
            token_ids=sequence.token_ids,
            num_prompt=sequence.num_prompt,
            choice=choice,
            matcher=request.matcher if is_first else sequence.matcher,
            weight_version=weight_version,
        )
        for choice in (range(request.sampling.n) if is_first else [sequence.choice])
    ]


def _computed(
    scheduled: ScheduledChunk,
    chunk: Chunk,
    results: list[SampledToken | MoerelayError],
    scores: Iterator[PromptLogprobs],
) -> ComputedChunk:
    tokens, error = tuple(r for r in results if isinstance(r, SampledToken)), None
    if len(tokens) < len(results):
        tokens, error = (), next(r for r in results if isinstance(r, MoerelayError))
    return ComputedChunk(scheduled, tokens, error, _prompt_logprobs(scheduled, chunk, scores))


def _prompt_logprobs(
    scheduled: ScheduledChunk, chunk: Chunk, scores: Iterator[PromptLogprobs]
) -> PromptLogprobs | None:
    """The entries that a chunk brought, taken from `scores`; with the prompt's first chunk also that of position 0."""
    num_top = _num_top(scheduled.sequence)
    if num_top is None:
        return None
    parts = [empty(1, num_top)] if scheduled.start == 0 else []
    parts += [next(scores)] if chunk.score_targets else []
    return PromptLogprobs(np.concatenate(parts)) if parts else None
