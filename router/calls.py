"""Calls to workers: errors that name the worker, and calls side by side whose failure is a plain exception."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from common.errors import WorkerLostError
from common.rpc import grpc_errors


@contextmanager
def worker_errors(worker_id: str) -> Iterator[None]:
    """Turns whatever a call to a worker raises into a MoerelayError.

    A server that stops answers live calls with status CANCELLED, which grpc.aio reports as if this task had been
    cancelled; unconverted, it would look like a client that left.
    """
    try:
        with grpc_errors():
            yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerLostError(f"worker {worker_id} cancelled the call", unreachable=True) from error
    except WorkerLostError as error:
        if not error.unreachable:
            raise
        raise WorkerLostError(f"worker {worker_id} went away: {error.message}", unreachable=True) from error


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An asyncio.TaskGroup that raises its first failure itself instead of wrapping it in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def all_tried(calls: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs them side by side. One that fails ends no other; when all have ended, the first error is raised."""
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if error is not None:
            raise error
