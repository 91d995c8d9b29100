"""ZeroMQ sockets as the handoff uses them: every option with its reason, the endpoints, and the loss of connections.

Nothing is encrypted or authenticated yet. CURVE keys belong into `new_socket`, and a ZAP allow-list of client keys onto
the listener's context.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar
from urllib.parse import urlsplit

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, HandoffRefusedError
from common.handoff.frames import MAX_FRAME_BYTES

#: How long a closing socket tries to deliver what is queued (an Abort, say). Bounded, or a dead peer would keep the
#: process from exiting: ZeroMQ's own default is for ever.
LINGER_MS = 200
#: A peer that vanished without closing its connection (power, network) is noticed after about interval + timeout.
HEARTBEAT_INTERVAL_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 4_000
#: A connection that does not speak ZMTP is dropped; below the handoff's own timeout, so that this reason is seen first.
HANDSHAKE_TIMEOUT_MS = 3_000
#: The kernel alone would try to reach a host that drops packets for minutes.
CONNECT_TIMEOUT_MS = 3_000
#: Connections that may wait to be accepted. A full backlog refuses ipc connections at once, and the usual 100 is less
#: than a large prefill fleet that starts together.
BACKLOG = 1_024
_LOSS_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

ResultT = TypeVar("ResultT")

log = structlog.get_logger()


class MonitoredSocket:
    """A ZeroMQ socket together with the events of its connections."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self._monitor = socket.get_monitor_socket(_LOSS_EVENTS)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns when there is a message or an event, when the socket is closed, or after the timeout."""
        await settled(self._poller.poll(-1 if timeout_s is None else max(1, round(timeout_s * 1000))))

    def receive_now(self) -> list[zmq.Frame] | None:
        """The next message, if one is there."""
        return _receive_now(self.socket)

    def lost_connection(self) -> bool:
        """Whether any connection was lost, or could not be made, since the last call."""
        lost = False
        while (frames := _receive_now(self._monitor)) is not None:
            event = parse_monitor_message([frame.bytes for frame in frames])
            log.debug("handoff_connection_event", kind=str(event["event"]))
            lost = True
        return lost

    @property
    def closed(self) -> bool:
        return bool(self.socket.closed)

    def close(self) -> None:
        if not self.closed:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self.socket.close()


def _receive_now(socket: zmq.asyncio.Socket) -> list[zmq.Frame] | None:
    future = future_of(socket.recv_multipart(zmq.NOBLOCK, copy=False))
    if isinstance(future.exception(), zmq.Again):
        return None
    return future.result()


def future_of(result: Awaitable[ResultT]) -> "asyncio.Future[ResultT]":
    """What the calls of zmq.asyncio really return; with NOBLOCK it is done already."""
    assert isinstance(result, asyncio.Future)
    return result


async def settled(result: Awaitable[ResultT]) -> "asyncio.Future[ResultT]":
    """Waits for a call of zmq.asyncio. Closing its socket cancels the call, but must not look like a cancelled task."""
    future = future_of(result)
    if not future.done():
        try:
            await asyncio.wait([future])
        finally:
            future.cancel()
    return future


def new_socket(
    context: zmq.asyncio.Context, kind: zmq.SocketType, endpoint: str, high_water_mark: int
) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, LINGER_MS)
    # At the mark a DEALER waits and a ROUTER fails with EAGAIN; credit keeps both below it.
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    # Larger frames end the connection before they take memory.
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # HEARTBEAT_TTL stays unset: each side judges the other by its own timeout.
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    # Only where the address says so: otherwise names would resolve to IPv6 first.
    socket.set(zmq.IPV6, int("//[" in endpoint))
    return socket


def tcp_host(endpoint: str, error: type[ConfigError] | type[HandoffRefusedError]) -> str | None:
    """The host of a tcp endpoint, None for ipc. Raises `error` for anything else."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if parts.scheme == "ipc" and endpoint != "ipc://":
        return None
    if parts.scheme == "tcp" and host and port is not None:
        return host
    raise error(f"{endpoint!r} is no handoff endpoint; use tcp://HOST:PORT or ipc://PATH")
