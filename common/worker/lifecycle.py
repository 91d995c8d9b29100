"""Whether a worker takes requests, and how many it is serving: what draining waits for."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import NotTakenError, PausedError


class Lifecycle:
    """Counts live calls; refuses new ones while it is draining or paused."""

    def __init__(self) -> None:
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        #: Says that it will take nothing new soon; set before `refusing`, so that everybody has heard of it by then.
        self.draining = False
        self.refusing = False
        self.paused = False
        #: Called when draining is over, however it ended: whoever streams to nobody in particular ends it then.
        self.at_stop: list[Callable[[], None]] = []

    @property
    def num_live(self) -> int:
        return self._live

    @contextmanager
    def serving(self, *, admitted: bool = False) -> Iterator[None]:
        """Holds one live call.

        Args:
            admitted: the call belongs to a request that another worker has admitted, so a pause does not refuse it.

        Raises:
            NotTakenError: the worker drains, and says so for long enough.
            PausedError: it is paused.
        """
        if self.refusing:
            raise NotTakenError("the worker is draining and takes no new requests")
        if self.paused and not admitted:
            raise PausedError("the worker is paused and takes no new requests")
        self._live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._live -= 1
            if not self._live:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no call is live."""
        await self._idle.wait()

    async def drain(self, timeout_s: float, pre_stop_s: float = 0.0) -> bool:
        """Refuses new calls and waits for the live ones; False if some were still live after `timeout_s`.

        `pre_stop_s`: how long it only says so before, and takes new calls all the same: whoever sends them asks for
        `draining` now and then, and calls are under way.
        """
        self.draining = True
        if pre_stop_s:
            await asyncio.sleep(pre_stop_s)
        self.refusing = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        finally:
            for stop in self.at_stop:
                stop()
        return True
