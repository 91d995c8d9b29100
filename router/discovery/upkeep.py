"""Keeps a roster true: looks listings up, tends every worker that is on it, lets go of those that are dropped."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from router.discovery.listing import Listing
from router.discovery.roster import Roster
from router.worker import Worker

#: No choice depends on a worker that is dropped; a call that has just given its last answer may still be ending.
CLOSING_GRACE_S = 1.0


class Upkeep:
    """`tend` runs for each worker while it is on the roster; `on_change` is called when that may have changed."""

    def __init__(
        self,
        roster: Roster,
        tend: Callable[[Worker], Coroutine[Any, Any, None]],
        on_change: Callable[[], None],
        *,
        interval_s: float,
    ) -> None:
        self._roster = roster
        self._tend = tend
        self._on_change = on_change
        self._interval_s = interval_s
        self._tending: dict[Worker, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While entered; closes every worker at the end."""
        try:
            async with asyncio.TaskGroup() as group:
                self._take_over(group)
                dynamic = [listing for listing in self._roster.listings if not listing.is_static]
                looking = [group.create_task(self._look(listing, group)) for listing in dynamic]
                try:
                    yield
                finally:
                    for task in [*looking, *self._tending.values()]:
                        task.cancel()
        finally:
            await asyncio.gather(*(worker.close() for worker in self._roster.members))

    async def _look(self, listing: Listing, group: asyncio.TaskGroup) -> None:
        while True:
            await listing.refresh()
            self._take_over(group)
            await asyncio.sleep(self._interval_s)

    def _take_over(self, group: asyncio.TaskGroup) -> None:
        for worker in self._roster.update():
            self._tending.pop(worker).cancel()
            group.create_task(worker.close(CLOSING_GRACE_S))
        for worker in self._roster.members:
            if worker not in self._tending:
                self._tending[worker] = group.create_task(self._tend(worker))
        self._on_change()
