"""The transport seam: how multipart messages get from prefill workers (P) to a decode worker (D) and back.

A transport delivers whole messages in order per connection, or reports the connection as lost; it never drops one of a
living connection. What the messages mean is not its business. Two transports exist: `zmq_channel` and
`memory_channel`; another one (RDMA, NIXL) implements the same three protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from common.handoff.frames import Frame

#: One connection of one prefill worker, as the listener names it; a new connection has a new id.
PeerId = NewType("PeerId", bytes)

#: Unread messages that one connection holds in each direction without blocking. The credit rules keep every
#: connection below it (see `outgoing`), so a queue that is full means a peer that has stopped reading.
HIGH_WATER_MARK = 32_768


@dataclass(frozen=True, slots=True)
class Received:
    """One multipart message."""

    peer: PeerId
    frames: Sequence[Frame]


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The connection is lost; everything that arrived before has been received."""

    peer: PeerId


class Listener(Protocol):
    """D's end: bound to one endpoint, talks to any number of peers."""

    @property
    def endpoint(self) -> str:
        """Where prefill workers connect."""
        ...

    async def receive(self) -> Received | PeerGone:
        """Waits for the next event of any peer. Cancelling it loses nothing."""
        ...

    async def send(self, peer: PeerId, frames: Sequence[Frame]) -> None:
        """Queues one message, without waiting for the peer.

        Raises:
            WorkerLostError: the peer is gone, or its queue is full because it has stopped reading.
        """
        ...

    async def close(self) -> None:
        """Ends within a second whatever is unsent; a second call does nothing."""
        ...


class Link(Protocol):
    """P's end of one connection. A link that was lost stays lost; it never reconnects by itself."""

    async def send(self, frames: Sequence[Frame]) -> None:
        """Queues one message, waiting while the queue is full. Raises WorkerLostError if the connection is lost."""
        ...

    def try_send(self, frames: Sequence[Frame]) -> bool:
        """Queues one message if that needs no waiting; returns whether it did."""
        ...

    async def receive(self) -> Sequence[Frame]:
        """Waits for the next message. Raises WorkerLostError once the connection is lost and all is received."""
        ...

    def close(self) -> None:
        """Gives the connection up; a second call does nothing."""
        ...


class Connector(Protocol):
    """P's side of the transport."""

    def connect(self, endpoint: str) -> Link:
        """Starts connecting; failure to reach the endpoint shows as a lost link.

        Raises:
            HandoffRefusedError: the endpoint is not one that this transport can use.
        """
        ...

    async def close(self) -> None:
        """Closes every link, within a second; a second call does nothing."""
        ...
