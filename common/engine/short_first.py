"""In which order the prompts of a step are computed, and how many of their tokens.

First come, first served makes a prompt of thirty tokens wait for all chunks of one of ten thousand that came before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.engine.pace import Pace, Remainder
from common.engine.sequence import Phase, SequenceState
from common.engine.step_times import StepWork

#: Tokens that prompts have computed for each one of those that overtake them: they lose no more than a quarter.
PRICE = 3

#: Steps of prompts for which short ones are still expected after one has met a long one. They come in bursts, as
#: streams of the same length end together: these are ten seconds or so where a step takes long enough to matter.
ALERT_STEPS = 16

#: A sequence that is not decoding, and the first position that is still to be computed.
OpenPrompt = tuple[SequenceState, int]


class Portion(NamedTuple):
    """What a step computes of prompts."""

    #: The first ones first.
    prompts: list[OpenPrompt]
    #: Tokens of all of them together.
    budget: int
    #: Of those tokens, how many are of prompts that overtake others.
    num_overtaking: int
    #: Short prompts meet some that take more than one step.
    is_contended: bool


class _Order(NamedTuple):
    """The prompts of a step as they are computed: so many short ones first."""

    prompts: list[OpenPrompt]
    num_short: int
    #: Tokens of short ones, and of those of them before which another prompt had come.
    short_tokens: int
    num_overtaking: int


class ShortFirst:
    """Short prompts go before others, and where these are long, their steps are kept short.

    A token bucket bounds what overtaking costs the others: a quarter of a step at once, and in the long run a quarter
    of all tokens.

    Args:
        budget: tokens per step; a prompt of which more are to be computed is long.
        least_chunk: tokens of a step without short prompts, whatever they take; smaller chunks cost too much.
    """

    def __init__(self, pace: Pace, budget: int, least_chunk: int = 0) -> None:
        self._pace = pace
        self._budget = budget
        self._least_chunk = least_chunk
        #: Tokens of others that have not been spent on tokens that overtake.
        self._most_earned = self._earned = PRICE * _quarter(budget)
        #: Prompt tokens before short prompts are not expected any more.
        self._alert_tokens = 0

    def portion(self, prompts: Sequence[OpenPrompt], decodes: StepWork, budget: int) -> Portion:
        """That of a step beside `decodes` which has `budget` tokens left; `prompts` in order of admission."""
        allowed = self._pace.prompt_budget(decodes, _remainders(self._ordered(prompts, budget).prompts), budget)
        order = self._ordered(prompts, allowed)
        meets_long = any(self._is_long(sequence) for sequence, _ in order.prompts[order.num_short :])
        is_contended = meets_long and not all(
            self._is_long(sequence) for sequence, _ in order.prompts[: order.num_short]
        )
        if is_contended or (meets_long and self._alert_tokens):
            least = order.short_tokens or self._least_chunk
            contended = self._pace.contended_budget(decodes, _remainders(order.prompts), allowed)
            allowed = max(contended, min(least, allowed))
        return Portion(order.prompts, allowed, order.num_overtaking, is_contended)

    def took(self, portion: Portion, num_tokens: int) -> None:
        """A step computes that portion, in which there are so many tokens."""
        earned = num_tokens - portion.num_overtaking - PRICE * portion.num_overtaking
        self._earned = min(self._earned + earned, self._most_earned)
        if portion.is_contended:
            self._alert_tokens = ALERT_STEPS * self._budget
        else:
            self._alert_tokens = max(0, self._alert_tokens - num_tokens)

    def _is_long(self, sequence: SequenceState) -> bool:
        """Whether it takes more than one step, from its first to its last."""
        return len(sequence.token_ids) - sequence.num_cached > self._budget

    def _ordered(self, prompts: Sequence[OpenPrompt], budget: int) -> _Order:
        """Those that come to their end within what may overtake, then the others, as they came.

        None of them overtakes a more urgent one, nor one that is computed again, whose stream stands still meanwhile.
        """
        room = most = min(_quarter(budget), self._earned // PRICE)
        num_overtaking = 0
        short: list[OpenPrompt] = []
        others: list[OpenPrompt] = []
        for sequence, start in prompts:
            missing = len(sequence.token_ids) - start
            if missing <= room and all(_may_overtake(sequence, other) for other, _ in others):
                room -= missing
                num_overtaking += missing if others else 0
                short.append((sequence, start))
            else:
                others.append((sequence, start))
        return _Order(short + others, len(short), most - room, num_overtaking)


def _quarter(num_tokens: int) -> int:
    return num_tokens // (1 + PRICE)


def _may_overtake(sequence: SequenceState, other: SequenceState) -> bool:
    return sequence.request.priority <= other.request.priority and other.phase is not Phase.RECOMPUTING


def _remainders(prompts: Sequence[OpenPrompt]) -> list[Remainder]:
    return [(start, len(sequence.token_ids)) for sequence, start in prompts]
