"""How a choice is told from outside that it has failed: its worker was lost, or the router stops."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Never

from common.errors import MoerelayError
from router.calls import task_group


class Failure:
    """Set at most once, by whoever knows; the first error wins. Any number of tasks may guard themselves with it."""

    def __init__(self) -> None:
        self._happened = asyncio.Event()
        self._error: MoerelayError | None = None

    def set(self, error: MoerelayError) -> None:
        self._error = self._error or error
        self._happened.set()

    @asynccontextmanager
    async def guarding(self) -> AsyncIterator[None]:
        """Cancels the block and raises the error as soon as it is set, also if that was before."""
        async with task_group() as group:
            watcher = group.create_task(self._raise())
            try:
                yield
            finally:
                watcher.cancel()

    async def _raise(self) -> Never:
        await self._happened.wait()
        assert self._error is not None, "`set` sets the error first"
        raise self._error
