"""Sockets that several processes listen on. The parent keeps them, so that connections survive a process that dies."""

import errno
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import StartupError
from common.process import host_port

#: Linux spreads connections over the sockets of one port; elsewhere the processes take them from one socket.
SPREADS_CONNECTIONS = sys.platform == "linux"

#: Host and port; of IPv6 also flow and scope. As `getaddrinfo` has it, with all that its type allows.
Address = tuple[int | str | bytes, ...]

#: Of an address that the machine has not; "localhost" names one of IPv6 also where that is switched off.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclass(frozen=True, slots=True)
class SharedPort:
    """A port that is bound, for as long as this object is kept.

    sockets: for each process those to listen on, one per address.
    claims: keep other routers of several processes from the addresses.
    """

    sockets: list[list[socket.socket]]
    claims: list[socket.socket]

    @property
    def port(self) -> int | None:
        """None until an address is bound."""
        return int(self.sockets[0][0].getsockname()[1]) if self.sockets[0] else None

    def close(self) -> None:
        """What the processes have inherited stays open."""
        for each in (*self.claims, *(each for mine in self.sockets for each in mine)):
            each.close()


def bind(host: str, port: int, count: int) -> SharedPort:
    """Binds, for that many processes, every address of `host`; port 0 becomes one free port for all.

    Raises:
        StartupError: the port is taken, or `host` is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return bind_addresses([(family, address) for family, _, _, _, address in found], count)
    except OSError as error:
        raise StartupError(f"cannot listen on {host_port(host, port)}: {error.strerror}") from error


def bind_addresses(addresses: Iterable[tuple[int, Address]], count: int) -> SharedPort:
    """Binds those of the addresses (family, and what `getaddrinfo` has for it) that this machine has.

    Raises:
        OSError: it has none of them, or one is taken.
    """
    shared = SharedPort([[] for _ in range(count)], [])
    missing: OSError | None = None
    try:
        for family, address in dict.fromkeys(addresses):
            try:
                _bind_all(family, _with_port(address, shared.port or address[1]), shared)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
        if missing is not None and not shared.sockets[0]:
            raise missing
    except OSError:
        shared.close()
        raise
    return shared


def _bind_all(family: int, address: Address, shared: SharedPort) -> None:
    """Adds one address to the port."""
    count = len(shared.sockets)
    # Without SO_REUSEPORT first: a second router on the port must fail, not take a share of the connections.
    probe = _bind_one(family, address, reuse_port=False)
    if SPREADS_CONNECTIONS:
        with probe:
            address = _with_port(address, probe.getsockname()[1])
            shared.claims.append(_claim(address))
        sockets = [_bind_one(family, address, reuse_port=True) for _ in range(count)]
    else:
        sockets = [probe] * count
    for mine, each in zip(shared.sockets, sockets, strict=True):
        mine.append(each)


def _with_port(address: Address, port: int | str | bytes) -> Address:
    return (address[0], port, *address[2:])


def _claim(address: Address) -> socket.socket:
    """Before anybody listens, a second router could bind what is bound, too: it is told apart by a name.

    Names of Linux's abstract namespace vanish with their process, and are as apart between containers as ports are.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind("\0moerelay-router " + " ".join(map(str, address)))
    except OSError:
        made.close()
        raise
    return made


def _bind_one(family: int, address: Address, *, reuse_port: bool) -> socket.socket:
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
