"""Who was chosen when: what decides among equals."""

from collections.abc import Sequence
from itertools import count

from router.placement.subject import Candidate


class Turns:
    """Remembers the turns of the candidates it saw last.

    A fixed order among equals would send every request of a quiet cluster to the same worker.
    """

    def __init__(self) -> None:
        self._ticks = count(1)
        self._last: dict[str, int] = {}

    def of(self, candidate: Candidate) -> int:
        """When it was chosen last; 0 is never."""
        return self._last.get(candidate.key, 0)

    def take(self, key: str, candidates: Sequence[Candidate]) -> None:
        """It is the candidate's turn. Of workers that are no candidates any more nothing is kept."""
        if len(self._last) > len(candidates):
            present = {candidate.key for candidate in candidates}
            self._last = {known: at for known, at in self._last.items() if known in present}
        self._last[key] = next(self._ticks)
