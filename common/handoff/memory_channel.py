"""The in-memory twin of the ZMQ channel, for tests and single-process clusters: same promises, no sockets."""

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from common.errors import ConfigError, HandoffRefusedError, WorkerLostError
from common.handoff.channel import HIGH_WATER_MARK, PeerGone, PeerId, Received
from common.handoff.frames import Frame

SCHEME = "memory://"


class MemoryNetwork:
    """Which listener is bound to which endpoint: the twin of a host's address space."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryListener] = {}
        self._last_peer = 0

    def new_peer(self) -> PeerId:
        """An id that no connection of this network has had."""
        self._last_peer += 1
        return PeerId(self._last_peer.to_bytes(4, "big"))


class MemoryListener:
    """D's end. Raises ConfigError if the endpoint is not a free `memory://` one."""

    def __init__(self, network: MemoryNetwork, endpoint: str, *, high_water_mark: int = HIGH_WATER_MARK) -> None:
        if not endpoint.startswith(SCHEME) or endpoint in network.listeners:
            raise ConfigError(f"{endpoint} is not a free endpoint; use another {SCHEME} name")
        self.high_water_mark = high_water_mark
        self._endpoint = endpoint
        self._network = network
        self._links: dict[PeerId, MemoryLink] = {}
        self._events: deque[Received | PeerGone] = deque()
        self._arrived = asyncio.Event()
        network.listeners[endpoint] = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        return self._endpoint

    async def receive(self) -> Received | PeerGone:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Received) and event.peer in self._links:
            self._links[event.peer].on_read()
        return event

    async def send(self, peer: PeerId, frames: Sequence[Frame]) -> None:
        link = self._links.get(peer)
        if link is None or not link.deliver(frames):
            raise WorkerLostError("the prefill worker is gone or has stopped reading")

    async def close(self) -> None:
        self._network.listeners.pop(self._endpoint, None)
        for link in self._links.values():
            link.lose()
        self._links.clear()

    def accept(self, link: "MemoryLink") -> PeerId:
        """A link connects."""
        peer = self._network.new_peer()
        self._links[peer] = link
        return peer

    def on_event(self, event: Received | PeerGone) -> None:
        """A link sent a message, or closed."""
        if isinstance(event, PeerGone):
            self._links.pop(event.peer, None)
        self._events.append(event)
        self._arrived.set()


class MemoryLink:
    """P's end of one connection; made by `MemoryConnector`."""

    def __init__(self, listener: MemoryListener | None, *, high_water_mark: int) -> None:
        self._listener = listener
        self._high_water_mark = high_water_mark
        self._num_unread = 0
        self._inbox: deque[Sequence[Frame]] = deque()
        #: Set on any change: a message arrived, one was read, the connection is lost.
        self._changed = asyncio.Event()
        self._peer = PeerId(b"") if listener is None else listener.accept(self)

    async def send(self, frames: Sequence[Frame]) -> None:
        while not self.try_send(frames):
            if self._listener is None:
                raise WorkerLostError("the decode worker is gone")
            await self._change()

    def try_send(self, frames: Sequence[Frame]) -> bool:
        if self._listener is None or self._num_unread >= self._high_water_mark:
            return False
        self._num_unread += 1
        self._listener.on_event(Received(self._peer, tuple(frames)))
        return True

    async def receive(self) -> Sequence[Frame]:
        while not self._inbox:
            if self._listener is None:
                raise WorkerLostError("the decode worker is gone")
            await self._change()
        return self._inbox.popleft()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.on_event(PeerGone(self._peer))
        self.lose()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def deliver(self, frames: Sequence[Frame]) -> bool:
        """The listener sends a message; False if the queue is full."""
        if len(self._inbox) >= self._high_water_mark:
            return False
        self._inbox.append(tuple(frames))
        self._changed.set()
        return True

    def on_read(self) -> None:
        """The listener has read one message."""
        self._num_unread -= 1
        self._changed.set()

    def lose(self) -> None:
        """The listener is gone, or this side has closed."""
        self._listener = None
        self._changed.set()


class MemoryConnector:
    """P's side."""

    def __init__(self, network: MemoryNetwork, *, high_water_mark: int = HIGH_WATER_MARK) -> None:
        self._network = network
        self._high_water_mark = high_water_mark
        self._links: list[MemoryLink] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def connect(self, endpoint: str) -> MemoryLink:
        if not endpoint.startswith(SCHEME):
            raise HandoffRefusedError(f"{endpoint!r} is no {SCHEME} endpoint")
        link = MemoryLink(self._network.listeners.get(endpoint), high_water_mark=self._high_water_mark)
        self._links.append(link)
        return link

    async def close(self) -> None:
        for link in self._links:
            link.close()
        self._links.clear()
