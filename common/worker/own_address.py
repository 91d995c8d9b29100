"""The address at which others reach this machine: `--advertise-address auto`, for containers, which learn it late."""

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from common.config import WorkerSettings
from common.errors import ConfigError

Routes = Sequence[tuple[socket.AddressFamily, str]]

#: Addresses for documentation (RFC 5737, RFC 3849): nothing is sent there, only the route is asked for.
ELSEWHERE: Routes = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def advertised(settings: WorkerSettings) -> str | None:
    """The host that others are told, if settings name one. Raises ConfigError if it is `auto` and there is none."""
    return own_address() if settings.advertise_address == "auto" else settings.advertise_address


def own_address(name: str | None = None, elsewhere: Routes = ELSEWHERE) -> str:
    """What this machine's name stands for (container runtimes see to that), else the address of its default route.

    Raises:
        ConfigError: this machine has loopback addresses only.
    """
    for host in (*_of_name(name or socket.gethostname()), *_of_routes(elsewhere)):
        if not ip_address(host).is_loopback:
            return host
    raise ConfigError("--advertise-address auto found no address but loopback; name the one that others reach")


def _of_name(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = [str(address[0]) for _, _, _, _, address in found]
    # An address with a zone is of one link only.
    return sorted((host for host in hosts if "%" not in host), key=lambda host: ":" in host)


def _of_routes(elsewhere: Routes) -> list[str]:
    hosts = []
    for family, host in elsewhere:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host, 9))
            except OSError:  # no such route
                continue
            hosts.append(str(probe.getsockname()[0]))
    return hosts
