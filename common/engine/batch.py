"""What one step computes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from common.engine.sequence import SequenceState
from common.engine.short_first import OpenPrompt
from common.engine.step_times import StepWork, num_pairs


class ScheduledChunk(NamedTuple):
    """Positions [start, end) of one sequence, to be forwarded in the next step."""

    sequence: SequenceState
    start: int
    end: int
    #: The last known token is forwarded, so that the next one can be sampled.
    samples: bool


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: decoding sequences first, in order of admission, then prompts and what is computed again.

    Before a freeze the other way round.
    """

    chunks: tuple[ScheduledChunk, ...]
    #: How much that is.
    work: StepWork


class Round:
    """One scheduling round: hands out the token budget. Thrown away when the batch is built."""

    def __init__(self, budget: int) -> None:
        #: Tokens that are left.
        self.budget = budget
        self._chunks: list[ScheduledChunk] = []
        self._decode_tokens = 0
        self._decode_pairs = 0
        self._prompt_tokens = 0
        self._prompt_pairs = 0.0

    def add_decodes(self, sequences: Iterable[SequenceState]) -> None:
        """Gives each its next token, as long as the budget lasts."""
        for sequence in sequences:
            if not self.budget:
                return
            end = len(sequence.token_ids)
            self._chunks.append(ScheduledChunk(sequence, end - 1, end, samples=True))
            self.budget -= 1
            self._decode_tokens += 1
            self._decode_pairs += end

    def add_prompts(self, prompts: Iterable[OpenPrompt], budget: int) -> None:
        """Gives each all tokens that it can forward, or what is left of `budget`, a part of the round's."""
        self.budget -= budget
        for sequence, start in prompts:
            known = len(sequence.token_ids)
            end = min(known, start + budget)
            if start < end:
                self._chunks.append(ScheduledChunk(sequence, start, end, samples=end == known))
                budget -= end - start
                self._prompt_tokens += end - start
                self._prompt_pairs += num_pairs(start, end)
        self.budget += budget

    @property
    def work(self) -> StepWork:
        """What has been given out."""
        return StepWork(self._prompt_tokens, self._prompt_pairs, self._decode_tokens, self._decode_pairs)

    def batch(self) -> ScheduledBatch | None:
        return ScheduledBatch(tuple(self._chunks), self.work) if self._chunks else None
