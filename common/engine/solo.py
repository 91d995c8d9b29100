"""The oracle: one request alone, its prompt in one chunk, then token by token. No scheduler, no cache, no handoff."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.engine.grammar import GrammarMatcher
from common.engine.sampler import SampleSpec, sample
from common.errors import InvalidRequestError, MoerelayError
from common.kv.pool import NULL_BLOCK, BlockId
from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk, Runner, StepOutput
from common.prompt_logprobs import PromptLogprobs, empty
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken, SamplingParams, finish_after


@dataclass(frozen=True, slots=True)
class SoloResult:
    """What every way of serving the request must return, bit for bit.

    `rows_TLK` is None when routing is off. `prompt_logprobs` has one row per prompt position, zeros for the first;
    None when they were not asked for.
    """

    tokens: tuple[SampledToken, ...]
    rows_TLK: RoutingArray | None
    finish: Finish
    prompt_logprobs: PromptLogprobs | None = None


class SoloRunner:
    """Runs requests one after the other in a store that nobody else uses."""

    def __init__(
        self, runner: Runner, store: KVStore, eos_token_ids: frozenset[int], *, weight_version: str = ""
    ) -> None:
        self._runner = runner
        self._store = store
        self._eos_token_ids = eos_token_ids
        self._weight_version = weight_version

    def run(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        routing_start: int | None = 0,
        *,
        choice: int = 0,
        matcher: GrammarMatcher | None = None,
    ) -> SoloResult:
        """Generates one choice.

        Args:
            choice: its index among the `n` of the request.
            matcher: compiled from `sampling.grammar`; stays as it is.

        Raises:
            InvalidRequestError: the store has too few blocks, or the parameters leave no token to choose from.
            MoerelayError: the logits are not finite, or a row is missing.
        """
        steps = self.steps(prompt, sampling, routing_start, choice=choice, matcher=matcher)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: SoloResult = end.value
                return result

    def steps(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        routing_start: int | None = 0,
        *,
        choice: int = 0,
        matcher: GrammarMatcher | None = None,
        piece_tokens: int | None = None,
    ) -> Generator[None, None, SoloResult]:
        """As `run`, with a pause after every forward pass, during which nobody else may use the store.

        Args:
            piece_tokens: the prompt is computed in pieces of so many tokens; None: at once.
        """
        assert (matcher is None) == (sampling.grammar is None), "a grammar comes with its matcher"
        matcher = None if matcher is None else matcher.fork()
        blocks = self._take_blocks(len(prompt) + sampling.max_tokens - 1)
        wants_rows = routing_start is not None
        scores: list[PromptLogprobs] = []
        for chunk in _prompt_chunks(prompt, sampling, blocks, wants_rows, piece_tokens or len(prompt)):
            output = self._runner.execute([chunk])
            scores += output.scores
            yield
        tokens: list[SampledToken] = []
        history = list(prompt)
        while True:
            spec = SampleSpec.of(
                sampling,
                self._eos_token_ids,
                token_ids=history,
                num_prompt=len(prompt),
                choice=choice,
                matcher=matcher,
                weight_version=self._weight_version,
            )
            tokens.append(_sample(output, spec))
            finish = finish_after(sampling, self._eos_token_ids, tokens[-1].token_id, len(tokens))
            if finish is not None:
                break
            end = len(history)
            history.append(tokens[-1].token_id)
            output = self._runner.execute([Chunk(history[end:], end, blocks, wants_logits=True, wants_rows=wants_rows)])
            yield
        rows_TLK = None
        if routing_start is not None:
            slots = slots_of(blocks, routing_start, len(history), self._store.layout.block_size)
            rows_TLK = self._store.read_rows(slots)
        return SoloResult(tuple(tokens), rows_TLK, finish, _prompt_logprobs(scores, sampling))

    def _take_blocks(self, num_slots: int) -> list[BlockId]:
        """The first blocks of the store, blank."""
        num_blocks = -(-num_slots // self._store.layout.block_size)
        if num_blocks >= self._store.num_blocks:
            raise InvalidRequestError(
                f"a solo run of {num_slots} positions needs {num_blocks} KV blocks, "
                f"but the store has {self._store.num_blocks - 1}; give it more",
                param="max_tokens",
            )
        blocks = [BlockId(b) for b in range(NULL_BLOCK + 1, NULL_BLOCK + 1 + num_blocks)]
        self._store.clear_blocks(blocks)
        return blocks


def _prompt_chunks(
    prompt: Sequence[int], sampling: SamplingParams, blocks: Sequence[BlockId], wants_rows: bool, piece_tokens: int
) -> Iterator[Chunk]:
    """The prompt in pieces; the last one brings the logits of the first token."""
    for start in range(0, len(prompt), piece_tokens):
        end = min(start + piece_tokens, len(prompt))
        is_scored = sampling.prompt_logprobs is not None
        yield Chunk(
            prompt[start:end],
            start,
            blocks,
            wants_logits=end == len(prompt),
            wants_rows=wants_rows,
            score_targets=prompt[start + 1 : end + 1] if is_scored else (),
            num_top=sampling.prompt_logprobs or 0,
        )


def _prompt_logprobs(scores: Sequence[PromptLogprobs], sampling: SamplingParams) -> PromptLogprobs | None:
    if sampling.prompt_logprobs is None:
        return None
    return PromptLogprobs(np.concatenate([empty(1, sampling.prompt_logprobs), *scores]))


def _sample(output: StepOutput, spec: SampleSpec) -> SampledToken:
    """The next token; its grammar moves on."""
    [result] = sample(output.logits_NV, [spec])
    if isinstance(result, MoerelayError):
        raise result
    if spec.matcher is not None:
        spec.matcher.accept(result.token_id)
    return result
