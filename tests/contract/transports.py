"""The transports that the handoff's contract suite runs on."""

from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils import z85

from common.handoff.channel import HIGH_WATER_MARK, Connector, Listener
from common.handoff.memory_channel import MemoryConnector, MemoryListener, MemoryNetwork
from common.handoff.zmq_channel import ZmqConnector, ZmqListener

NAMES = ("memory", "ipc", "tcp", "curve")


class Transport(Protocol):
    """Makes both ends of one kind of channel."""

    def listen(self, endpoint: str | None = None, *, high_water_mark: int = HIGH_WATER_MARK) -> Listener: ...

    def connector(self, *, high_water_mark: int = HIGH_WATER_MARK) -> Connector: ...

    def unused_endpoint(self) -> str:
        """Where nobody listens."""
        ...


class MemoryTransport:
    """All ends share one network."""

    def __init__(self) -> None:
        self._network = MemoryNetwork()

    def listen(self, endpoint: str | None = None, *, high_water_mark: int = HIGH_WATER_MARK) -> Listener:
        return MemoryListener(self._network, endpoint or "memory://decode", high_water_mark=high_water_mark)

    def connector(self, *, high_water_mark: int = HIGH_WATER_MARK) -> Connector:
        return MemoryConnector(self._network, high_water_mark=high_water_mark)

    def unused_endpoint(self) -> str:
        return "memory://nobody"


class ZmqTransport:
    """Sockets under a temporary directory, or on free loopback ports."""

    def __init__(self, fresh_endpoint: str, unused_endpoint: str) -> None:
        self._fresh_endpoint = fresh_endpoint
        self._unused_endpoint = unused_endpoint

    def listen(self, endpoint: str | None = None, *, high_water_mark: int = HIGH_WATER_MARK) -> Listener:
        return ZmqListener(endpoint or self._fresh_endpoint, high_water_mark=high_water_mark)

    def connector(self, *, high_water_mark: int = HIGH_WATER_MARK) -> Connector:
        return ZmqConnector(high_water_mark=high_water_mark)

    def unused_endpoint(self) -> str:
        return self._unused_endpoint


class CurveTransport:
    """Sockets on free loopback ports that are encrypted and admit one key."""

    def __init__(self) -> None:
        public, secret = zmq.curve_keypair()
        self._public, self._secret = (z85.decode(key).hex() for key in (public, secret))

    def listen(self, endpoint: str | None = None, *, high_water_mark: int = HIGH_WATER_MARK) -> Listener:
        address = (endpoint or "tcp://127.0.0.1:0").partition("?")[0]
        return ZmqListener(address, high_water_mark=high_water_mark, admitted=lambda: [self._public])

    def connector(self, *, high_water_mark: int = HIGH_WATER_MARK) -> Connector:
        return ZmqConnector(high_water_mark=high_water_mark, secret_key=lambda: self._secret)

    def unused_endpoint(self) -> str:
        return f"tcp://127.0.0.1:1?curve={self._public}"


def make_transport(name: str, directory: Path) -> Transport:
    if name == "memory":
        return MemoryTransport()
    if name == "curve":
        return CurveTransport()
    if name == "ipc":
        return ZmqTransport(f"ipc://{directory}/decode", f"ipc://{directory}/nobody")
    return ZmqTransport("tcp://127.0.0.1:0", "tcp://127.0.0.1:1")
