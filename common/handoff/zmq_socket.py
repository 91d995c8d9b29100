"""ZeroMQ sockets as the handoff uses them: every option with its reason, the endpoints, and the loss of connections.

`curve` has what encrypts them and who is let in.
"""

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from common.errors import ConfigError, HandoffRefusedError
from common.handoff.frames import MAX_FRAME_BYTES, Frame

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

#: Plain numbers: arithmetic with the enumerations costs more than a call to ZeroMQ.
_NO_WAIT, _SEND_MORE, _EVENTS = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.EVENTS)
_READABLE, _WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)
#: Frames of at least this size are sent from where they lie; below, copying costs less than being told of their end.
_MIN_SHARED_BYTES = zmq.COPY_THRESHOLD

log = structlog.get_logger()


class MonitoredSocket:
    """A ZeroMQ socket together with the events of its connections, on the event loop that runs.

    Calls go to ZeroMQ at once and without a future each, as those of `zmq.asyncio` have it, because a chunk takes less
    time than they do. The loop watches the sockets' descriptors, which say no more than that something has changed:
    whatever sends or receives may consume that signal, so that it also looks for what it meant, if anybody waits for
    that. Only `lost_connection` need not: it takes all that the monitor, which is never written to, has.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_LOSS_EVENTS)
        #: The peer did not admit this socket's key.
        self.was_refused = False
        self._readable, self._writable = asyncio.Event(), asyncio.Event()
        self._num_waiting = 0
        self._loop = asyncio.get_running_loop()
        self._descriptors = [each.fileno() for each in (self._socket, self._monitor)]
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._look)

    def _look(self) -> None:
        if self.closed:
            return
        self._look_at_socket()
        if _events_of(self._monitor) & _READABLE:
            self._readable.set()

    def _look_at_socket(self) -> None:
        events = _events_of(self._socket)
        if events & _READABLE:
            self._readable.set()
        if events & _WRITABLE:
            self._writable.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns when there is a message or an event, when the socket is closed, or after the timeout."""
        await self._change(self._readable, timeout_s)

    async def wait_for_room(self) -> None:
        """Returns when a message may be sent, or the socket is closed."""
        await self._change(self._writable, None)

    async def _change(self, event: asyncio.Event, timeout_s: float | None) -> None:
        event.clear()
        if self.closed:
            return
        self._look()
        self._num_waiting += 1
        try:
            if timeout_s is None:  # what happens for every message should not pay for a timer
                await event.wait()
            else:
                async with asyncio.timeout(timeout_s):
                    await event.wait()
        except TimeoutError:
            pass
        finally:
            self._num_waiting -= 1

    def receive_now(self) -> list[zmq.Frame] | None:
        """The next message, if one is there."""
        try:
            return _receive_now(self._socket)
        finally:
            if self._num_waiting:
                self._look_at_socket()

    def send_now(self, frames: Sequence[Frame]) -> bool:
        """Queues one message if that needs no waiting; returns whether it did. Raises ZMQError: there is no peer."""
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _SEND_MORE, copy=len(frame) < _MIN_SHARED_BYTES)
            self._socket.send(frames[-1], _NO_WAIT, copy=len(frames[-1]) < _MIN_SHARED_BYTES)
        # Only ever at the first frame: ZeroMQ takes a message whole.
        except zmq.Again:
            return False
        finally:
            if self._num_waiting:
                self._look_at_socket()
        return True

    def lost_connection(self) -> bool:
        """Whether any connection was lost, or could not be made, since the last call."""
        lost = False
        while _events_of(self._monitor) & _READABLE and (frames := _receive_now(self._monitor)) is not None:
            event = parse_monitor_message([frame.bytes for frame in frames])
            log.debug("handoff_connection_event", kind=str(event["event"]))
            self.was_refused |= event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            lost = True
        return lost

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        if self.closed:
            return
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        self._readable.set()
        self._writable.set()


def _events_of(socket: "zmq.Socket[bytes]") -> int:
    return int(socket.get(_EVENTS))


def _receive_now(socket: "zmq.Socket[bytes]") -> list[zmq.Frame] | None:
    try:
        frames = [socket.recv(_NO_WAIT, copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(socket.recv(_NO_WAIT, copy=False))
    return frames


def new_socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: zmq.SocketType, endpoint: str, high_water_mark: int
) -> "zmq.Socket[bytes]":
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
