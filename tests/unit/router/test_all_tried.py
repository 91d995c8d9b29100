"""Calls side by side that do not end one another."""

import asyncio

import pytest

from common.errors import WorkerLostError
from router.calls import all_tried


async def test_one_that_fails_ends_no_other_and_is_told_at_the_end() -> None:
    failed, ended = asyncio.Event(), list[int]()

    async def fails() -> None:
        failed.set()
        raise WorkerLostError("gone")

    async def waits(number: int) -> None:
        await failed.wait()
        await asyncio.sleep(0)
        ended.append(number)

    with pytest.raises(WorkerLostError, match="gone"):
        await all_tried([waits(1), fails(), waits(2)])
    assert sorted(ended) == [1, 2]


async def test_a_cancelled_caller_cancels_all() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    task = asyncio.create_task(all_tried([waits()]))
    await began.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert cancelled.is_set()
