"""Round robin: workers take turns, whatever they have to do."""

from collections.abc import Sequence

from router.placement.subject import Candidate, Subject
from router.placement.turns import Turns


class RoundRobin:
    """The candidate that was not chosen for longest."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        key = min(candidates, key=self._turns.of).key
        self._turns.take(key, candidates)
        return key
