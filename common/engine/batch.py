"""What one step computes."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, end) of one sequence, to be forwarded in the next step."""

    sequence: SequenceState
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """The last known token is forwarded, so that the next one can be sampled."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: decoding sequences first, then prompts and what is computed again, each in order of admission.

    Before a freeze the other way round.
    """

    chunks: tuple[ScheduledChunk, ...]


class Round:
    """One scheduling round: hands out the token budget. Thrown away when the batch is built."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._chunks: list[ScheduledChunk] = []

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Gives each sequence all tokens it can forward, or what is left of the budget."""
        for sequence in sequences:
            start = sequence.num_computed
            end = min(len(sequence.token_ids), start + self._budget)
            if start < end:
                self._budget -= end - start
                self._chunks.append(ScheduledChunk(sequence, start, end))

    def batch(self) -> ScheduledBatch | None:
        return ScheduledBatch(tuple(self._chunks)) if self._chunks else None
