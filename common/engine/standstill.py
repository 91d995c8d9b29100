"""A clock that stands still while an engine is being frozen, and as long as it is. Pure: times are arguments."""


class Standstill:
    """What the time would be if the engine had never stopped letting requests in."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """The clock stops, unless it has."""
        if self._since is None:
            self._since = now

    def end(self, now: float) -> None:
        """The clock goes on, unless it does."""
        self._lost_s = now - self.read(now)
        self._since = None

    def read(self, now: float) -> float:
        """Seconds; `now` is never less than in earlier calls."""
        return (now if self._since is None else self._since) - self._lost_s
