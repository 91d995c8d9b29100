"""Which workers are known: those that are listed, and those that no longer are but still serve somebody. Sans-I/O."""

from collections.abc import Callable, Sequence

from router.discovery.listing import Listing
from router.worker import Side, Worker
from router.worker_state import State


class Roster:
    """`connect` makes a worker; whoever asks `update` closes those that it gives back."""

    def __init__(self, listings: Sequence[Listing], connect: Callable[[str, Side], Worker]) -> None:
        self.listings = listings
        self._connect = connect
        self._members: dict[tuple[Side, str], Worker] = {}
        self.update()

    @property
    def workers(self) -> list[Worker]:
        """In the order of the configuration, then those that leave. Of a process that is listed twice, the first."""
        seen: set[tuple[Side, str]] = set()
        return [worker for worker in self.members if not _is_known(worker, seen)]

    @property
    def members(self) -> Sequence[Worker]:
        """All of them, the same process at another address too."""
        return list(self._members.values())

    def was_asked(self, side: Side) -> bool:
        """Whether everything that lists workers of this side has been looked up, and they have been asked."""
        listings = [listing for listing in self.listings if listing.side == side]
        workers = [worker for worker in self.members if worker.side == side]
        return all(listing.was_asked for listing in listings) and all(worker.was_asked for worker in workers)

    def update(self) -> list[Worker]:
        """Takes over what the listings say now; returns the workers that are dropped."""
        for listing in self.listings:
            listing.forget([worker.address for worker in self.members if worker.state is State.DEAD])
        listed = _sources(self.listings)
        before = self._members
        self._members = {key: before.get(key) or self._connect(key[1], key[0]) for key in listed}
        unlisted = {key: worker for key, worker in before.items() if key not in listed}
        self._members |= {key: worker for key, worker in unlisted.items() if worker.is_needed}
        for key, worker in self._members.items():
            worker.listed = key in listed
            worker.source = listed.get(key, worker.source)
        return [worker for worker in unlisted.values() if not worker.is_needed]


def _sources(listings: Sequence[Listing]) -> dict[tuple[Side, str], str]:
    """Every address that is listed, with the first that lists it, in the order of the configuration."""
    found: dict[tuple[Side, str], str] = {}
    for listing in listings:
        for address in listing.addresses:
            found.setdefault((listing.side, address), listing.source)
    return found


def _is_known(worker: Worker, seen: set[tuple[Side, str]]) -> bool:
    """Whether the worker is the same process as one before; if not, it is seen now.

    Networks that overlap list a container once for each. It must not be counted, nor be told anything, twice.
    """
    if worker.status is None or worker.state is State.DEAD:
        return False
    process = worker.side, worker.status.instance_id
    known = process in seen
    seen.add(process)
    return known
