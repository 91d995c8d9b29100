"""A name server on loopback that answers from a table, over UDP."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """`records` by name, as lines of a zone file; names that are not there do not exist. `rcode` is for all, if set."""

    def __init__(self) -> None:
        self.records: dict[str, Sequence[str]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # asyncio's own is no subclass of it

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        question = query.question[0]
        found = self.records.get(question.name.to_text(omit_final_dot=True))
        answer.set_rcode(self.rcode or (dns.rcode.NXDOMAIN if found is None else dns.rcode.NOERROR))
        if found and self.rcode is None:
            kind = dns.rdatatype.to_text(question.rdtype)
            answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", kind, *found))
        self._transport.sendto(answer.to_wire(), addr)

    @classmethod
    @asynccontextmanager
    async def serving(cls) -> AsyncIterator[tuple["NameServer", dns.asyncresolver.Resolver]]:
        """The server, and what asks it."""
        loop = asyncio.get_running_loop()
        transport, server = await loop.create_datagram_endpoint(cls, local_addr=("127.0.0.1", 0))
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = transport.get_extra_info("sockname")[1]
        try:
            yield server, resolver
        finally:
            transport.close()
