"""Shows how far a checkpoint is loaded: a bar on a terminal, log lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from common.progress import Advance, on_terminal, progress_bar

#: Often enough to see that it goes on; a checkpoint that loads faster logs nothing.
_LOG_INTERVAL_S = 2.0

log = structlog.get_logger()


@contextmanager
def loading_progress(num_bytes: int, *, enabled: bool) -> Iterator[Advance]:
    """Shows the way to `num_bytes` on stderr if `enabled`."""
    if not enabled:
        yield lambda count: None
    elif on_terminal():
        with progress_bar("loading", num_bytes, in_bytes=True) as advance:
            yield advance
    else:
        yield LoggedProgress(num_bytes).advance


class LoggedProgress:
    """Logs how much is loaded, at most every few seconds."""

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_bytes = num_bytes
        self._num_loaded = 0
        self._clock = clock
        self._last_s = clock()

    def advance(self, num_bytes: int) -> None:
        self._num_loaded += num_bytes
        now_s = self._clock()
        if now_s - self._last_s < _LOG_INTERVAL_S:
            return
        self._last_s = now_s
        percent = 100 * self._num_loaded // max(1, self._num_bytes)
        log.info("loading", percent=percent, loaded_bytes=self._num_loaded, total_bytes=self._num_bytes)
