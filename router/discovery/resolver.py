"""The seam between who needs workers' addresses and who knows them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from router.discovery.host_records import HostRecords
from router.discovery.listed_in_file import ListedInFile


class Resolver(Protocol):
    """One source of addresses."""

    async def resolve(self) -> Sequence[str]:
        """HOST:PORT of every worker that is listed now, in an order that does not change by itself.

        None, if there is an answer and it says so. Raises UnavailableError if there is no answer.
        """
        ...


def resolver_of(source: str) -> Resolver | None:
    """What looks `source` up, one of --prefill or --decode as `common.setting_types` accepts it; None: an address."""
    scheme, found, rest = source.partition("://")
    if not found:
        return None
    if scheme == "srv":
        from router.discovery.srv_records import SrvRecords  # late: a tenth of a second that few need

        return SrvRecords.of_system(rest)
    if scheme == "file":
        return ListedInFile(Path(rest))
    assert scheme == "dns", f"{source} was not validated"
    host, _, port = rest.rpartition(":")
    return HostRecords(host, int(port))
