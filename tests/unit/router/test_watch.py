"""A router process that answers nothing is killed, and one that answers is not."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web

from router.processes.watch import kill_when_silent
from tests.unit.router.test_siblings import answering, silent

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="router processes are of one port")


async def living() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)


async def test_a_process_that_answers_nothing_is_killed(tmp_path: Path) -> None:
    process = await living()
    async with silent(tmp_path / "socket"):
        await kill_when_silent(process, tmp_path / "socket", interval_s=0.01, max_unanswered=3)
    assert await process.wait() == -signal.SIGKILL


async def test_only_questions_in_a_row_count(tmp_path: Path) -> None:
    """Every second answer comes: nothing is killed, however long that goes on."""
    process, asked, enough, released = await living(), 0, asyncio.Event(), asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 6:
            enough.set()
        if asked % 2:
            await released.wait()
        return web.Response(status=500)

    async with answering(tmp_path / "socket", answer):
        watch = asyncio.create_task(kill_when_silent(process, tmp_path / "socket", interval_s=0.2, max_unanswered=8))
        await enough.wait()
        watch.cancel()
        await asyncio.wait([watch])
        released.set()
    assert process.returncode is None
    process.kill()
    await process.wait()
