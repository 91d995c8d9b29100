"""Draining refuses new calls and waits for live ones."""

import asyncio

import pytest

from common.errors import UnavailableError
from common.worker.lifecycle import Lifecycle


async def test_drain_waits_for_the_last_call() -> None:
    lifecycle, leave = Lifecycle(), asyncio.Event()

    async def call() -> None:
        with lifecycle.serving():
            await leave.wait()

    calls = [asyncio.create_task(call()) for _ in range(2)]
    await asyncio.sleep(0)
    drain = asyncio.create_task(lifecycle.drain(timeout_s=10))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match="draining"), lifecycle.serving():
        pass
    assert not drain.done()
    leave.set()
    await asyncio.gather(*calls)
    assert await drain


async def test_drain_gives_up_in_time() -> None:
    lifecycle = Lifecycle()
    with lifecycle.serving():
        assert not await lifecycle.drain(timeout_s=0.01)


async def test_before_it_refuses_it_only_says_so() -> None:
    lifecycle = Lifecycle()
    drain = asyncio.create_task(lifecycle.drain(timeout_s=10, pre_stop_s=60))
    while not lifecycle.draining:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    with lifecycle.serving():
        assert lifecycle.num_live == 1
    drain.cancel()


async def test_an_idle_worker_drains_at_once() -> None:
    assert await Lifecycle().drain(timeout_s=0.01)
