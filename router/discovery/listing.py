"""What one of --prefill and --decode lists now, and what became of the last lookup. Says so when it changes."""

from collections.abc import Callable, Collection, Sequence

import structlog

from common.errors import UnavailableError
from common.process import host_of
from router.discovery.resolver import Resolver
from router.worker import Side

log = structlog.get_logger()


class Listing:
    """`source` as it is configured; without a resolver it is itself the only address.

    `check`: why the router must not call that host; an answer that names one is none.
    A lookup that fails changes nothing. An answer without addresses takes nobody out of service that lives: name
    servers say so, too, of services none of whose replicas they hold for ready. But who is dead is forgotten then.
    """

    def __init__(
        self, side: Side, source: str, resolver: Resolver | None, check: Callable[[str], str | None] | None = None
    ) -> None:
        self.side = side
        self.source = source
        self.addresses: Sequence[str] = [] if resolver else [source]
        #: Why the last lookup failed; None: it did not.
        self.failure: str | None = None
        #: There was a lookup, whatever came of it.
        self.was_asked = resolver is None
        self._resolver = resolver
        self._check = check
        self._is_empty = False
        #: What is wrong, as it was logged last; None: nothing is.
        self._complaint: str | None = None

    @property
    def is_static(self) -> bool:
        """It never changes."""
        return self._resolver is None

    async def refresh(self) -> None:
        """Looks it up once; whoever calls again does so after this has returned."""
        assert self._resolver is not None, "an address needs no lookup"
        try:
            self._answered(self._checked(await self._resolver.resolve()))
        except UnavailableError as error:
            self.failure = error.message
            self._complain("discovery_failed", reason=error.message)
        self.was_asked = True

    def forget(self, dead: Collection[str]) -> None:
        """Drops workers that are dead, if the last answer has not named them either."""
        if self._is_empty:
            self.addresses = [address for address in self.addresses if address not in dead]

    def _checked(self, addresses: Sequence[str]) -> Sequence[str]:
        for host in map(host_of, addresses):
            if self._check and (reason := self._check(host)):
                raise UnavailableError(f"{self.source} lists workers that are out of bounds: {reason}")
        return addresses

    def _answered(self, addresses: Sequence[str]) -> None:
        self.failure = None
        self._is_empty = not addresses
        if not addresses:
            self._complain("discovery_found_nobody")
            return
        self._complaint = None
        added = [address for address in addresses if address not in self.addresses]
        removed = [address for address in self.addresses if address not in addresses]
        if added or removed:
            log.info("discovery_changed", source=self.source, side=self.side, added=added, removed=removed)
        self.addresses = addresses

    def _complain(self, event: str, **details: str) -> None:
        """Once, until something else happens: lookups go on for ever."""
        if event != self._complaint:
            log.warning(event, source=self.source, kept=list(self.addresses), **details)
        self._complaint = event
