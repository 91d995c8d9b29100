"""In which order the prompts of a step are computed. Pure.

First come, first served makes a prompt of thirty tokens wait for all chunks of one of ten thousand that came before it.
"""

from collections.abc import Sequence

from common.engine.pace import Pace, Remainder
from common.engine.sequence import Phase, SequenceState
from common.engine.step_times import StepWork

#: Part of a step's tokens for prompts that it brings to their end: the others lose no more than that to them.
SHARE = 0.25

#: A sequence that is not decoding, and the first position that is still to be computed.
OpenPrompt = tuple[SequenceState, int]


def short_first(prompts: Sequence[OpenPrompt], budget: int) -> list[OpenPrompt]:
    """Those that fit into SHARE of the budget together, then the others; in both the order of before.

    None of them overtakes a more urgent one, nor one that is computed again, whose stream stands still meanwhile.
    """
    room = int(budget * SHARE)
    short: list[OpenPrompt] = []
    others: list[OpenPrompt] = []
    for sequence, start in prompts:
        missing = len(sequence.token_ids) - start
        if missing <= room and all(_may_overtake(sequence, other) for other, _ in others):
            room -= missing
            short.append((sequence, start))
        else:
            others.append((sequence, start))
    return short + others


def _may_overtake(sequence: SequenceState, other: SequenceState) -> bool:
    return sequence.request.priority <= other.request.priority and other.phase is not Phase.RECOMPUTING


def share_out(
    prompts: Sequence[OpenPrompt], decodes: StepWork, budget: int, pace: Pace
) -> tuple[list[OpenPrompt], int]:
    """The prompts in the order in which a step beside `decodes` computes them, and how many tokens of them it may."""
    allowed = pace.prompt_budget(decodes, _remainders(short_first(prompts, budget)), budget)
    return short_first(prompts, allowed), allowed


def _remainders(prompts: Sequence[OpenPrompt]) -> list[Remainder]:
    return [(start, len(sequence.token_ids)) for sequence, start in prompts]
