"""What the step after a batch will probably compute, as far as that is known before its tokens are. Pure.

Everybody goes on; nobody comes in, stops early or is preempted. Where that is wrong, nothing but time is lost.
"""

from collections.abc import Iterable

from common.engine.batch import ScheduledBatch
from common.engine.request import EngineRequest, Work
from common.engine.sequence import Phase, SequenceState
from common.engine.short_first import OpenPrompt, ShortFirst
from common.engine.step_times import StepWork
from common.model.batch import Chunk


def forecast(
    batch: ScheduledBatch, seated: Iterable[SequenceState], budget: int, block_size: int, short_first: ShortFirst
) -> list[Chunk]:
    """The chunks of the next step, in its order, with ids of 0; none where a block or a choice is missing for it.

    Args:
        seated: as the scheduler has them, in order of admission.
        budget: tokens per step.
        short_first: how many of them may be of which prompts; it may learn otherwise until then.
    """
    ends = {chunk.sequence: chunk for chunk in batch.chunks}
    decodes: list[Chunk] = []
    prompts: list[OpenPrompt] = []
    for sequence in seated:
        chunk = ends.get(sequence)
        if chunk is None or not chunk.samples:
            if sequence.phase is not Phase.LEASED:
                prompts.append((sequence, sequence.num_computed if chunk is None else chunk.end))
            continue
        num_generated = sequence.num_generated
        if _leaves(sequence.request, num_generated):
            continue
        if chunk.end >= len(sequence.blocks) * block_size or _is_forked_after(sequence.request, num_generated):
            return []
        decodes.append(_chunk(sequence, chunk.end, chunk.end + 1, samples=True))
    if not prompts:
        return decodes
    work = StepWork(decode_tokens=len(decodes), decode_pairs=sum(chunk.end for chunk in decodes))
    portion = short_first.portion(prompts, work, budget - len(decodes))
    return decodes + _parts(portion.prompts, portion.budget)


def _parts(prompts: Iterable[OpenPrompt], budget: int) -> list[Chunk]:
    """What is left of the budget, for each of those that are computed in parts."""
    chunks = []
    for sequence, start in prompts:
        end = min(len(sequence.token_ids), start + budget)
        if start < end:
            budget -= end - start
            chunks.append(_chunk(sequence, start, end, samples=end == len(sequence.token_ids)))
    return chunks


def _leaves(request: EngineRequest, num_generated: int) -> bool:
    """With the token that the batch brings: the last one, or one that another worker goes on from."""
    return request.work is Work.PREFILL or num_generated + 1 >= request.sampling.max_tokens


def _is_forked_after(request: EngineRequest, num_generated: int) -> bool:
    """The token is the first of several choices, which all want to come in."""
    return num_generated == 0 and request.sampling.n > 1


def _chunk(sequence: SequenceState, start: int, end: int, *, samples: bool) -> Chunk:
    return Chunk([0] * (end - start), start, sequence.blocks, wants_logits=samples, wants_rows=sequence.wants_rows)
