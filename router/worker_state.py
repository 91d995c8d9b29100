"""Whether a worker can be used, from its heartbeats alone. Sans-I/O; time is an argument, in seconds of any clock."""

from enum import StrEnum

#: Failed heartbeats in a row after which a worker counts as dead. One may be an accident; a process that is gone
#: refuses the second one at once, a frozen one lets it time out.
MISSES_UNTIL_DEAD = 2


#: A worker that stays dead is asked after an eighth more of the time for which it has been: more and more rarely.
_SHARE_OF_DEATH = 1 / 8
#: But at least after so many heartbeats: one that comes serves a few seconds later.
_MAX_INTERVALS = 4


class State(StrEnum):
    """The values are those of /cluster."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    DRAINING = "draining"


class WorkerState:
    """Starts dead: a worker that never answered cannot be used."""

    def __init__(self, silence_limit_s: float) -> None:
        self._silence_limit_s = silence_limit_s
        self._misses = MISSES_UNTIL_DEAD
        self._heard_at = float("-inf")
        self._draining = False

    def heard(self, now: float, *, draining: bool) -> None:
        """A heartbeat was answered."""
        self._misses = 0
        self._heard_at = now
        self._draining = draining

    def missed(self) -> None:
        """A heartbeat failed or timed out."""
        self._misses += 1

    def suspect(self) -> None:
        """A request found the worker gone. Many requests may do so at once, so this alone never makes it dead."""
        self._misses = max(self._misses, 1)

    def drains(self) -> None:
        """A request was told so, before any heartbeat was."""
        self._draining = True

    def at(self, now: float) -> State:
        if self._misses >= MISSES_UNTIL_DEAD:
            return State.DEAD
        if self._misses or now - self._heard_at > self._silence_limit_s:
            return State.SUSPECT
        return State.DRAINING if self._draining else State.HEALTHY


def pause_s(dead_s: float, interval_s: float) -> float:
    """Until the next heartbeat of a worker that has been dead for so long; 0: it is not."""
    return min(max(dead_s * _SHARE_OF_DEATH, interval_s), _MAX_INTERVALS * interval_s)
