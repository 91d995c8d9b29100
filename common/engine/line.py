"""Everybody who waits for blocks or a seat. Sans-I/O."""

import bisect
from collections.abc import Iterator

from common.engine.sequence import SequenceState, Urgency


class WaitingLine:
    """WAITING prompts, FORKED choices and PREEMPTED sequences, the most urgent first."""

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences)

    @property
    def head(self) -> SequenceState | None:
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: SequenceState) -> None:
        bisect.insort(self._sequences, sequence, key=urgency_of)

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out of the line, wherever it stands."""
        index = bisect.bisect_left(self._sequences, sequence.urgency, key=urgency_of)
        assert self._sequences[index] is sequence, f"{sequence.name} does not wait"
        del self._sequences[index]


def urgency_of(sequence: SequenceState) -> Urgency:
    """For sorting: what is more urgent is smaller."""
    return sequence.urgency
