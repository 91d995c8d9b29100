"""A and AAAA records of a name, each of which is a worker: container networks have one for each replica."""

import socket
from collections.abc import Callable, Sequence
from typing import Any

from common.daemon_thread import on_daemon_thread
from common.errors import UnavailableError
from common.process import host_port

#: What `socket.getaddrinfo` returns: family, kind, protocol, canonical name, and an address that begins with the host.
AddressInfo = tuple[int, int, int, str, tuple[Any, ...]]
Lookup = Callable[[str, int], Sequence[AddressInfo]]

#: The name does not exist, or has no addresses. Everything else says that nobody could be asked.
_NOTHING = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})


def _look_up(host: str, port: int) -> Sequence[AddressInfo]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class HostRecords:
    """Looked up as the machine does, with its hosts file and search domains.

    Where a name has addresses of both kinds, those of IPv6 are left out: they are the same workers once more.
    """

    def __init__(self, host: str, port: int, look_up: Lookup = _look_up) -> None:
        self._host = host.removeprefix("[").removesuffix("]")
        self._port = port
        self._look_up = look_up

    async def resolve(self) -> Sequence[str]:
        try:
            # Silent name servers are waited for half a minute.
            found = await on_daemon_thread(lambda: self._look_up(self._host, self._port), "discovery")
        except socket.gaierror as error:
            if error.errno in _NOTHING:
                return []
            raise UnavailableError(f"{self._host} cannot be looked up: {error.strerror}") from error
        except OSError as error:
            raise UnavailableError(f"{self._host} cannot be looked up: {error.strerror}") from error
        except UnicodeError as error:
            raise UnavailableError(f"{self._host} is no host name: {error}") from error
        hosts = {family: {str(address[0]) for *_, address in _of(family, found)} for family in _FAMILIES}
        chosen = hosts[socket.AF_INET] or hosts[socket.AF_INET6]
        return [host_port(host, self._port) for host in sorted(chosen)]


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _of(family: int, found: Sequence[AddressInfo]) -> list[AddressInfo]:
    return [info for info in found if info[0] == family]
