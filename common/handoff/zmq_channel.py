"""The handoff channel over ZeroMQ: one DEALER per connection on prefill workers, one ROUTER on a decode worker.

A message of one empty frame is a probe: the listener finds out with it which connections are gone; links drop it.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

import structlog
import zmq

from common.config import is_loopback
from common.errors import ConfigError, HandoffRefusedError, WorkerLostError
from common.handoff.channel import HIGH_WATER_MARK, PeerGone, PeerId, Received
from common.handoff.curve import Admission, call, serve, split_key, with_key
from common.handoff.frames import Frame
from common.handoff.zmq_socket import (
    BACKLOG,
    CONNECT_TIMEOUT_MS,
    MonitoredSocket,
    new_socket,
    tcp_host,
)

#: Seconds after a disconnect at which peers are probed: at once, and again because the socket may learn of the loss a
#: little later than the monitor.
PROBE_DELAYS_S = (0.0, 0.02, 0.2)

#: The one empty frame of a probe.
PROBE: Frame = b""

log = structlog.get_logger()


class ZmqListener:
    """D's end.

    Args:
        endpoint: what to bind; `tcp://HOST:0` takes a free port.
        advertise_host: host name or address at which prefill workers reach a tcp endpoint, if it is not HOST.
        admitted: public keys of the prefill workers that may connect to a tcp endpoint, asked for each; None: anybody
            may, and nothing is encrypted. Sockets of ipc are for whoever may enter their folder.

    Raises:
        ConfigError: the endpoint cannot be bound, or nobody could connect to it.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        advertise_host: str | None = None,
        high_water_mark: int = HIGH_WATER_MARK,
        admitted: Callable[[], Collection[str]] | None = None,
    ) -> None:
        host = tcp_host(endpoint, ConfigError)
        if host is not None and admitted is None and not is_loopback(host):
            log.warning("handoff_not_encrypted", endpoint=endpoint, advice="anybody who reaches this port is trusted")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = new_socket(self._context, zmq.ROUTER, endpoint, high_water_mark)
        self._admission: Admission | None = None
        key: str | None = None
        if host is not None and admitted is not None:
            self._admission = Admission(self._context, admitted)
            key = serve(socket)
        self._socket = MonitoredSocket(socket)
        self._peers: set[PeerId] = set()
        self._gone: list[PeerId] = []
        self._probe_times: list[float] = []
        try:
            address = _bind(socket, endpoint, host, advertise_host)
            self._endpoint = address if key is None else with_key(address, key)
        except ConfigError:
            self._close_sockets()
            self._context.term()
            raise

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
        while True:
            if self._gone:
                return PeerGone(self._gone.pop())
            message = self._socket.receive_now()
            if message is not None:
                peer = PeerId(message[0].bytes)
                self._peers.add(peer)
                return Received(peer, [frame.buffer for frame in message[1:]])
            self._look_for_losses()
            if not self._gone:
                await self._socket.wait(self._probe_times[0] - time.monotonic() if self._probe_times else None)

    def _look_for_losses(self) -> None:
        now = time.monotonic()
        if self._socket.lost_connection():
            self._probe_times = [now + delay for delay in PROBE_DELAYS_S]
        if self._probe_times and self._probe_times[0] <= now:
            self._probe_times.pop(0)
            self._gone += [peer for peer in self._peers if not self._try_send(peer, [PROBE])]
            self._peers.difference_update(self._gone)

    async def send(self, peer: PeerId, frames: Sequence[Frame]) -> None:
        if not self._try_send(peer, frames):
            raise WorkerLostError("the prefill worker is gone or has stopped reading")

    def _try_send(self, peer: PeerId, frames: Sequence[Frame]) -> bool:
        try:
            return self._socket.send_now([peer, *frames])
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise

    @property
    def num_refused(self) -> int:
        """Clients that were sent away for their key."""
        return self._admission.num_refused if self._admission else 0

    async def close(self) -> None:
        self._close_sockets()
        # Waits for LINGER_MS at most.
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self) -> None:
        self._socket.close()
        if self._admission is not None:
            self._admission.close()
            self._admission = None


def _bind(socket: "zmq.Socket[bytes]", endpoint: str, host: str | None, advertise_host: str | None) -> str:
    """Returns what prefill workers connect to. Raises ConfigError."""
    # Without it a message to a lost peer vanishes silently.
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.BACKLOG, BACKLOG)
    try:
        # ZeroMQ binds to addresses, not to names.
        socket.bind(endpoint.replace("//localhost:", "//127.0.0.1:"))
    except zmq.ZMQError as error:
        raise ConfigError(f"the handoff endpoint {endpoint} cannot be bound: {error.strerror}") from error
    bound = str(socket.get_string(zmq.LAST_ENDPOINT))
    if host is None:
        return bound
    name = advertise_host or host
    if name in ("*", "0.0.0.0", "::"):
        raise ConfigError(f"nobody can connect to {name}; name the address of this host with --advertise-address")
    port = bound.rpartition(":")[2]
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


class ZmqLink:
    """P's end of one connection; made by `ZmqConnector`."""

    def __init__(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        self._socket = MonitoredSocket(socket)
        self._endpoint = endpoint
        self._lost = False

    @property
    def closed(self) -> bool:
        return self._socket.closed

    async def send(self, frames: Sequence[Frame]) -> None:
        while not self.try_send(frames):
            if self._lost or self.closed:
                raise self._loss()
            await self._socket.wait_for_room()

    def try_send(self, frames: Sequence[Frame]) -> bool:
        return not self._lost and not self.closed and self._socket.send_now(frames)

    async def receive(self) -> Sequence[Frame]:
        while not self.closed:
            # Looked up before the messages, so that those that came before the loss are received before it shows.
            self._lost = self._lost or self._socket.lost_connection()
            message = self._socket.receive_now()
            if message is None:
                if self._lost:
                    break
                await self._socket.wait()
            elif len(message) > 1 or message[0].buffer.nbytes:
                return [frame.buffer for frame in message]
        raise self._loss()

    def close(self) -> None:
        self._socket.close()

    def _loss(self) -> WorkerLostError:
        if self._socket.was_refused:
            return WorkerLostError(
                f"the decode worker at {self._endpoint} does not admit this worker's key; "
                "give both the files of one folder of `moerelay keys`"
            )
        return WorkerLostError(f"the connection to the decode worker at {self._endpoint} is lost or cannot be made")


class ZmqConnector:
    """P's side.

    Args:
        secret_key: of this worker, in hexadecimal, asked for each connection; None: it has none, and connects only to
            those that need none.
        insecure: connects without encryption beyond this machine, too.
    """

    def __init__(
        self,
        *,
        high_water_mark: int = HIGH_WATER_MARK,
        secret_key: Callable[[], str] | None = None,
        insecure: bool = False,
    ) -> None:
        self._secret_key = secret_key
        self._insecure = insecure
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._high_water_mark = high_water_mark
        self._links: list[ZmqLink] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def num_open(self) -> int:
        """Sockets that are open."""
        self._links = [link for link in self._links if not link.closed]
        return len(self._links)

    def connect(self, endpoint: str) -> ZmqLink:
        address, server_key = split_key(endpoint)
        secret_key = self._check_protection(address, server_key)
        socket = new_socket(self._context, zmq.DEALER, address, self._high_water_mark)
        if server_key is not None and secret_key is not None:
            call(socket, server_key, secret_key)
        # A connection that was lost has lost messages too, so its transfers fail and the next one gets a new socket.
        # Reconnecting would deliver what is queued for a dead process to its successor.
        socket.set(zmq.RECONNECT_IVL, -1)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        link = ZmqLink(socket, address)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            link.close()
            raise HandoffRefusedError(f"{address!r} is no endpoint to connect to: {error.strerror}") from error
        self._links = [*(other for other in self._links if not other.closed), link]
        return link

    def _check_protection(self, address: str, server_key: str | None) -> str | None:
        """This worker's key, if it has one. Raises HandoffRefusedError if the connection must not be made."""
        host = tcp_host(address, HandoffRefusedError)
        if server_key is None and host is not None and not (self._insecure or is_loopback(host)):
            raise HandoffRefusedError(
                f"the decode worker at {address} is on another machine and encrypts nothing; start it with "
                "--cluster-key-file, or this worker with --insecure"
            )
        secret_key = self._secret_key() if self._secret_key else None
        if server_key is not None and secret_key is None:
            raise HandoffRefusedError(
                f"the decode worker at {address} admits only workers with keys; start this one with --cluster-key-file"
            )
        return secret_key

    async def close(self) -> None:
        for link in self._links:
            link.close()
        # Waits for LINGER_MS at most.
        await asyncio.to_thread(self._context.term)
