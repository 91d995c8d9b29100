"""Whether a worker takes requests, and how many it is serving: what draining waits for."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import UnavailableError


class Lifecycle:
    """Counts live calls; once draining, refuses new ones."""

    def __init__(self) -> None:
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Holds one live call. Raises UnavailableError when the worker is draining."""
        if self.draining:
            raise UnavailableError("the worker is draining and takes no new requests")
        self._live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._live -= 1
            if not self._live:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new calls and waits for the live ones; False if some were still live after `timeout_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
