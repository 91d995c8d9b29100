"""Least loaded: the worker with the fewest choices."""

from collections.abc import Sequence

from router.placement.subject import Candidate, Subject
from router.placement.turns import Turns


class LeastLoaded:
    """Among equals the candidate that was not chosen for longest."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        key = min(candidates, key=lambda candidate: (candidate.load, self._turns.of(candidate))).key
        self._turns.take(key, candidates)
        return key
