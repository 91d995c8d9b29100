"""Power of two choices: the less loaded of two workers drawn by chance."""

from collections.abc import Sequence
from random import Random

from router.placement.subject import Candidate, Subject


class TwoChoices:
    """After Mitzenmacher (1996).

    Several routers whose picture of the loads is as old as a heartbeat do not all rush to the worker that was the
    least loaded then.
    """

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()

    def choose(self, candidates: Sequence[Candidate], subject: Subject) -> str:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda candidate: candidate.load).key
