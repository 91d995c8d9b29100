"""Leaves a worker alone that answers heartbeats but fails what it is given. Sans-I/O; time is an argument."""

#: Failures in a row. Fewer may be one request that breaks wherever it runs, tried again by its client.
MAX_FAILURES = 3
#: How long it is left alone at first, and at most; twice as long after each failed trial.
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Breaker:
    """Without it, a worker that fails at once would always be the least loaded and draw everything to itself.

    After `MAX_FAILURES` failures in a row the worker is set aside, then tried with one request: a success closes the
    matter, a failure doubles the pause.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._retry_at = float("-inf")
        self._on_trial = False

    @property
    def open(self) -> bool:
        """The worker is set aside, or on trial."""
        return self._failures >= MAX_FAILURES

    def allows(self, now: float) -> bool:
        """Whether the worker may be given something, if there are others."""
        return not self.open or now >= self._retry_at

    def taken(self, now: float) -> None:
        """The worker was given something: if that is a trial, nothing more until it has ended or taken too long."""
        if self.open and now >= self._retry_at:
            self._retry_at = now + self._pause_s
            self._on_trial = True

    def failed(self, now: float) -> None:
        """The worker failed what it was given. What it was given before it was set aside says nothing new."""
        if self.open:
            if not self._on_trial:
                return
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._on_trial = False
        self._failures += 1
        if self.open:
            self._retry_at = now + self._pause_s

    def succeeded(self) -> None:
        """The worker did what it was given."""
        self._failures = 0
        self._on_trial = False
        self._pause_s = FIRST_PAUSE_S
