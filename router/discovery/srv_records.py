"""SRV records of a name (RFC 2782), each of which is a worker with a port of its own."""

from collections.abc import Sequence
from typing import Self

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from common.errors import UnavailableError
from common.process import host_port

#: One lookup, all its retries together; the next one follows soon.
LOOKUP_TIMEOUT_S = 5.0


class SrvRecords:
    """Priorities and weights are not looked at: the router knows what each worker has to do."""

    def __init__(self, name: str, resolver: dns.asyncresolver.Resolver) -> None:
        self._name = name
        self._resolver = resolver

    @classmethod
    def of_system(cls, name: str) -> Self:
        """Asks the machine's name servers. Raises UnavailableError if it has none."""
        try:
            return cls(name, dns.asyncresolver.Resolver())
        except dns.resolver.NoResolverConfiguration as error:
            raise UnavailableError(f"srv://{name} cannot be looked up: no name server is configured") from error

    async def resolve(self) -> Sequence[str]:
        try:
            answer = await self._resolver.resolve(self._name, "SRV", search=True, lifetime=LOOKUP_TIMEOUT_S)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return []
        except dns.exception.DNSException as error:
            raise UnavailableError(f"{self._name} cannot be looked up: {error}") from error
        records = [record for record in answer if isinstance(record, SRV)]
        # The root as the only target says that there is decidedly no such service.
        named = [
            (record.target.to_text(omit_final_dot=True), record.port)
            for record in records
            if record.target.labels != (b"",)
        ]
        return sorted(host_port(host, port) for host, port in named)
