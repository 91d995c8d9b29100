"""Whether what is to be started here could listen."""

import errno
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.process import host_port
from deploy.doctor.check import Check
from deploy.doctor.listeners import listener

#: Hosts that stand for every address of this machine, by the family.
_ALL_ADDRESSES = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where something is to listen; the flags name port and host on its command line."""

    flag: str
    host: str
    port: int
    host_flag: str = "--host"

    @property
    def family(self) -> socket.AddressFamily:
        """Of its host; the router listens on one family."""
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def excludes(self, other: "Wanted") -> bool:
        """Both want the same port of the same address."""
        if self.family != other.family:
            return False
        hosts = {"127.0.0.1" if host == "localhost" else host for host in (self.host, other.host)}
        return self.port == other.port != 0 and (len(hosts) == 1 or _ALL_ADDRESSES[self.family] in hosts)


def check_port(wanted: Wanted) -> None:
    """Listens there for a moment; somebody else may still be faster later.

    Raises:
        ConfigError: the port is taken, or the host is no address of this machine.
    """
    try:
        socket.create_server((wanted.host, wanted.port), family=wanted.family).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host_port(wanted.host, wanted.port)}: {str(error.strerror).partition(' (')[0]}; "
            f"choose another {wanted.flag} (0: a free one) or {wanted.host_flag}"
        ) from error


def check_ports(wanted: Sequence[Wanted]) -> Iterator[Check]:
    """A line per port: it is free, taken by whom, or wanted twice. 0 stands for a free one, which there must be."""
    for number, each in enumerate(wanted):
        address = host_port(each.host, each.port)
        name = "port" if each.port else "free port"
        earlier = next(filter(each.excludes, wanted[:number]), None)
        if earlier is not None:
            yield Check(name, "bad", f"{address} is wanted by {earlier.flag} and by {each.flag}", "change one of them")
        else:
            yield _check(name, each)


def _check(name: str, wanted: Wanted) -> Check:
    address = host_port(wanted.host, wanted.port)
    try:
        check_port(wanted)
    except ConfigError as error:
        is_taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        holder = listener(wanted.port) if is_taken else None
        if holder is None:
            return Check.of_error(name, error)
        found = f"{address} is taken by {holder.command} (process {holder.pid})"
        return Check(name, "bad", found, f"end it, or choose another {wanted.flag} (0: a free one)")
    return Check(name, "ok", f"{wanted.flag}: {address} is free" if wanted.port else f"{wanted.flag}: there is one")
