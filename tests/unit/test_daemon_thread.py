"""Calls that may never return."""

import asyncio
import threading

import pytest

from common.daemon_thread import on_daemon_thread


async def test_values_and_errors_come_back() -> None:
    assert await on_daemon_thread(threading.current_thread, "call") is not threading.main_thread()

    def fail() -> None:
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        await on_daemon_thread(fail, "call")


def test_nobody_waits_for_a_call_that_hangs() -> None:
    """The event loop closes while it is under way; a thread of its default executor would hold it."""
    go, over = threading.Event(), threading.Event()

    def hang() -> None:
        go.wait()
        over.set()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await on_daemon_thread(hang, "call")

    asyncio.run(give_up())
    assert not over.is_set()
    go.set()
    assert over.wait(60)
