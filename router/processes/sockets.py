"""Sockets that several processes listen on. The parent keeps them, so that connections survive a process that dies."""

import socket
import sys
from collections.abc import Sequence

from common.errors import StartupError
from common.process import host_port

#: Linux spreads connections over the sockets of one port; elsewhere the processes take them from one socket.
SPREADS_CONNECTIONS = sys.platform == "linux"


def bind(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """For each process the sockets to listen on, one per address of `host`; port 0 becomes one free port for all.

    Raises:
        StartupError: the port is taken, or `host` is no address of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        bound: list[list[socket.socket]] = [[] for _ in range(count)]
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in addresses):
            sockets = _bind_all(family, (address[0], port, *address[2:]), count)
            port = port or sockets[0].getsockname()[1]
            for mine, each in zip(bound, sockets, strict=True):
                mine.append(each)
    except OSError as error:
        raise StartupError(f"cannot listen on {host_port(host, port)}: {error.strerror}") from error
    return bound


def _bind_all(family: int, address: tuple[object, ...], count: int) -> Sequence[socket.socket]:
    # Without SO_REUSEPORT first: a second router on the port must fail, not take a share of the connections.
    probe = _bind_one(family, address, reuse_port=False)
    if not SPREADS_CONNECTIONS:
        return [probe] * count
    address = (address[0], probe.getsockname()[1], *address[2:])
    probe.close()
    return [_bind_one(family, address, reuse_port=True) for _ in range(count)]


def _bind_one(family: int, address: tuple[object, ...], *, reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As asyncio: a port whose last connections are still in TIME_WAIT may be taken again.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setblocking(False)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
