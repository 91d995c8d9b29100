"""Whether the engine gets on: a process that answers although its engine hangs must not be taken for healthy."""

import time
from collections.abc import Callable

from common.engine.loop import Engine


class EngineHealth:
    """Of one engine. A prompt of any length is no reason to complain, a step that does not end is."""

    def __init__(self, engine: Engine, step_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._step_timeout_s = step_timeout_s
        self._clock = clock

    def complaint(self) -> str | None:
        """Why nothing should be sent here now; None if there is no reason."""
        if not self._engine.alive:
            return "the engine thread has ended; restart this worker"
        busy_s = self._engine.busy_s(self._clock())
        if busy_s <= self._step_timeout_s:
            return None
        return (
            f"the engine has been busy with one step for {busy_s:.1f} s; if steps take that long here, "
            f"raise --step-timeout-s ({self._step_timeout_s:g})"
        )
