"""Tasks that live exactly as long as the object that needs them."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class BackgroundTasks:
    """A task group for work that never ends by itself: leaving cancels it, and waits until it is over.

    As with `asyncio.TaskGroup`, a task that raises cancels the body and comes out as an ExceptionGroup. Unlike there,
    an exception of the body itself comes out as it is, because nobody should have to look for it in a group.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        # The group must see a cancellation, to tell its own from one that came from outside.
        if isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)
        else:
            await self._group.__aexit__(None, None, None)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs the coroutine until it returns, its task is cancelled, or the body is left."""
        task = self._group.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
