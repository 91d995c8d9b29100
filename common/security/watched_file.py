"""Files with keys, read again whenever they have changed, so that keys are rotated without a restart."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import structlog

from common.errors import ConfigError

#: Between two looks at a file. Keys overlap for as long as the operator likes, so nothing depends on it.
POLL_INTERVAL_S = 1.0

DAY_S = 24 * 3600.0

ValueT = TypeVar("ValueT")

#: What tells one content of a file from another without reading it: inode, time of change, size.
_Signature = tuple[int, int, int]

log = structlog.get_logger()


class Pollable(Protocol):
    """A watched file, whatever is in it."""

    def poll(self) -> None: ...


class WatchedFile(Generic[ValueT]):
    """`value` is what `read` made of the file when it could be read last; `on_change` is called when that is another.

    `every_day`: called with it once a day of polling.
    Raises ConfigError, of `read`, if that is never. A file that breaks or vanishes later changes nothing.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], ValueT],
        on_change: Callable[[ValueT], None] = lambda _: None,
        *,
        every_day: Callable[[ValueT], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._read = read
        self._on_change = on_change
        self._every_day = every_day
        self._clock = clock
        self._day_began_at = clock()
        self._known = _signature(path)
        self._pending: _Signature | None = None
        self.value = read(path)

    def poll(self) -> None:
        """Looks at the file.

        A change is read at the second look that finds it: whoever writes the file may not do so in one step.
        """
        if self._clock() - self._day_began_at >= DAY_S:
            self._day_began_at = self._clock()
            self._every_day(self.value)
        found = _signature(self._path)
        if found == self._known:
            self._pending = None
            return
        if found != self._pending:
            self._pending = found
            return
        self._known, self._pending = found, None
        self._take_over()

    def _take_over(self) -> None:
        try:
            value = self._read(self._path)
        except ConfigError as error:
            log.error("key_file_unusable", reason=error.message, hint="the keys that it had before stay in use")
            return
        if value != self.value:
            self.value = value
            log.info("key_file_read_again", path=str(self._path))
            self._on_change(value)


def _signature(path: Path) -> _Signature | None:
    """None if it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@asynccontextmanager
async def reading(files: Sequence[Pollable]) -> AsyncIterator[None]:
    """Looks at them while entered."""
    task = asyncio.create_task(keep_reading(files))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def keep_reading(files: Sequence[Pollable], interval_s: float = POLL_INTERVAL_S) -> None:
    """Looks at them for ever."""
    while True:
        await asyncio.sleep(interval_s)
        for file in files:
            file.poll()
