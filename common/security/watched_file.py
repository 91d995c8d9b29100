"""Files with keys, read again whenever they have changed, so that keys are rotated without a restart."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import structlog

from common.daemon_thread import on_daemon_thread
from common.errors import ConfigError

#: Between two looks at a file. Keys overlap for as long as the operator likes, so nothing depends on it.
POLL_INTERVAL_S = 1.0

#: A mount that is silent for so long is said to hang.
LOOK_TIMEOUT_S = 10.0

DAY_S = 24 * 3600.0

ValueT = TypeVar("ValueT")

#: What tells one content of a file from another without reading it: inode, time of change, size.
_Signature = tuple[int, int, int]

log = structlog.get_logger()


class Pollable(Protocol):
    """A watched file, whatever is in it."""

    @property
    def path(self) -> Path: ...

    def look(self) -> Callable[[], None]: ...


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
        self.path = path
        self._read = read
        self._on_change = on_change
        self._every_day = every_day
        self._clock = clock
        self._day_began_at = clock()
        self._known = _signature(path)
        self._pending: _Signature | None = None
        self.value = read(path)

    def poll(self) -> None:
        """Looks at the file, and takes over what it says."""
        self.look()()

    def look(self) -> Callable[[], None]:
        """Looks at the file, in any thread; what it gives takes over what was found, in the thread of who uses it.

        A change is read at the second look that finds it: whoever writes the file may not do so in one step.
        """
        found = _signature(self.path)
        if found == self._known:
            self._pending = None
        elif found != self._pending:
            self._pending = found
        else:
            self._known, self._pending = found, None
            return self._read_again()
        return self._count_days

    def _read_again(self) -> Callable[[], None]:
        try:
            value = self._read(self.path)
        except ConfigError as error:
            log.error("key_file_unusable", reason=error.message, hint="the keys that it had before stay in use")
            return self._count_days
        return partial(self._take_over, value)

    def _take_over(self, value: ValueT) -> None:
        if value != self.value:
            self.value = value
            log.info("key_file_read_again", path=str(self.path))
            self._on_change(value)

    def _count_days(self) -> None:
        if self._clock() - self._day_began_at >= DAY_S:
            self._day_began_at = self._clock()
            self._every_day(self.value)


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


async def keep_reading(
    files: Sequence[Pollable], interval_s: float = POLL_INTERVAL_S, timeout_s: float = LOOK_TIMEOUT_S
) -> None:
    """Looks at them for ever, at each on its own: one may be on a mount that hangs."""
    async with asyncio.TaskGroup() as group:
        for file in files:
            group.create_task(_keep_reading(file, interval_s, timeout_s))


async def _keep_reading(file: Pollable, interval_s: float, timeout_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        looking = asyncio.create_task(on_daemon_thread(file.look, "watched-file"))
        if not (await asyncio.wait([looking], timeout=timeout_s))[0]:
            reason = f"{file.path} cannot be looked at: no answer for {timeout_s:g} s; does its mount hang?"
            log.error("key_file_unusable", reason=reason, hint="the keys that it had before stay in use")
        (await looking)()
