"""Whether what is to be started here could listen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.process import host_port
from deploy.doctor.check import Check
from deploy.doctor.listeners import listener
from deploy.up import check_port


@dataclass(frozen=True, slots=True)
class Wanted:
    """Where something is to listen; `flag` names the port on its command line."""

    flag: str
    host: str
    port: int


def check_ports(wanted: Sequence[Wanted]) -> Iterator[Check]:
    """A line per port: it is free, taken by whom, or wanted twice. 0 stands for a free one, which there must be."""
    seen: dict[tuple[str, int], Wanted] = {}
    for each in wanted:
        address = host_port(each.host, each.port)
        name = "port" if each.port else "free port"
        earlier = seen.setdefault((each.host, each.port), each) if each.port else each
        if earlier is not each:
            yield Check(name, "bad", f"{address} is wanted by {earlier.flag} and by {each.flag}", "change one of them")
        else:
            yield _check(name, each)


def _check(name: str, wanted: Wanted) -> Check:
    address = host_port(wanted.host, wanted.port)
    try:
        check_port(wanted.host, wanted.port, f"{wanted.flag} or --host")
    except ConfigError as error:
        holder = listener(wanted.port) if wanted.port else None
        if holder is None:
            return Check.of_error(name, error)
        found = f"{address} is taken by {holder.command} (process {holder.pid})"
        return Check(name, "bad", found, f"end it, or choose another {wanted.flag}")
    return Check(name, "ok", f"{wanted.flag}: {address} is free" if wanted.port else f"{wanted.flag}: there is one")
