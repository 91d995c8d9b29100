"""Background tasks end with their owner, and exceptions keep their identity."""

import asyncio

import pytest

from common.handoff.background import BackgroundTasks


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def test_leaving_cancels_and_waits() -> None:
    ended: list[str] = []
    async with BackgroundTasks() as tasks:
        tasks.start(forever(ended))
        await asyncio.sleep(0)
    assert ended == ["ended"]


async def test_the_bodys_exception_comes_out_as_it_is() -> None:
    ended: list[str] = []

    async def body() -> None:
        async with BackgroundTasks() as tasks:
            tasks.start(forever(ended))
            await asyncio.sleep(0)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await body()
    assert ended == ["ended"]


async def test_cancelling_the_body_cancels_the_tasks_and_stays_a_cancellation() -> None:
    ended: list[str] = []

    async def body() -> None:
        async with BackgroundTasks() as tasks:
            tasks.start(forever(ended))
            await asyncio.Event().wait()

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["ended"]


async def test_a_task_that_breaks_ends_the_body() -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    async def body() -> None:
        async with BackgroundTasks() as tasks:
            tasks.start(broken())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as group:
        await body()
    assert [type(error) for error in group.value.exceptions] == [ValueError]
