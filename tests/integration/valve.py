"""A channel that a test can hold up or cut: what a slow or broken network does to handoffs."""

import asyncio
from collections.abc import Sequence

from common.handoff.channel import Connector, Link
from common.handoff.frames import Frame


class Valve:
    """Lets chunks of KV and rows pass: all of them, so many of them, or none. Other messages are never held up."""

    def __init__(self) -> None:
        self.num_passed = 0
        self._limit: int | None = None
        self._changed = asyncio.Event()
        self._links: list[ValvedLink] = []

    def open(self) -> None:
        """Everything may pass."""
        self._set_limit(None)

    def allow(self, num_chunks: int) -> None:
        """From now on so many chunks may pass, on all connections together; later ones wait."""
        self._set_limit(self.num_passed + num_chunks)

    def _set_limit(self, limit: int | None) -> None:
        self._limit = limit
        self._tell()

    def cut(self) -> None:
        """Closes every connection that is open now."""
        for link in self._links:
            link.close()
        self._links.clear()

    async def wait_passed(self, num_chunks: int) -> None:
        """Returns once so many chunks have passed in all."""
        while self.num_passed < num_chunks:
            await self._changed.wait()

    async def wait_exhausted(self) -> None:
        """Returns once everything that `allow` allowed has passed."""
        assert self._limit is not None, "an open valve is never exhausted"
        await self.wait_passed(self._limit)

    async def enter(self) -> None:
        """Waits for permission to pass one chunk."""
        while self._limit is not None and self.num_passed >= self._limit:
            await self._changed.wait()
        self.num_passed += 1
        self._tell()

    def add(self, link: "ValvedLink") -> None:
        self._links.append(link)

    def _tell(self) -> None:
        """Wakes everybody who waits now; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


class ValvedLink:
    """A link whose chunks (the messages with payload frames) pass through the valve."""

    def __init__(self, inner: Link, valve: Valve) -> None:
        self._inner = inner
        self._valve = valve
        valve.add(self)

    async def send(self, frames: Sequence[Frame]) -> None:
        if len(frames) > 1:
            await self._valve.enter()
        await self._inner.send(frames)

    def try_send(self, frames: Sequence[Frame]) -> bool:
        # Chunks wait at the valve, if only for a moment: whoever sends them has to be ready to.
        return len(frames) == 1 and self._inner.try_send(frames)

    async def receive(self) -> Sequence[Frame]:
        return await self._inner.receive()

    def close(self) -> None:
        self._inner.close()


class ValvedConnector:
    """A connector that makes such links."""

    def __init__(self, inner: Connector, valve: Valve) -> None:
        self._inner = inner
        self._valve = valve

    def connect(self, endpoint: str) -> ValvedLink:
        return ValvedLink(self._inner.connect(endpoint), self._valve)

    async def close(self) -> None:
        await self._inner.close()
