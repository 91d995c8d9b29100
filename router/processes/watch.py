"""Ends a router process that hangs: it lives, but its event loop answers nothing while its connections wait."""

import asyncio
from pathlib import Path

import aiohttp
import structlog

#: Between two questions, and how long one may take to be answered.
PING_INTERVAL_S = 5.0
#: Questions in a row without an answer: half a minute, which nothing that a router does takes on its event loop.
MAX_UNANSWERED = 6

log = structlog.get_logger()


async def kill_when_silent(
    process: asyncio.subprocess.Process,
    path: Path,
    *,
    interval_s: float = PING_INTERVAL_S,
    max_unanswered: int = MAX_UNANSWERED,
) -> None:
    """Asks the process that listens on the unix socket `path` again and again; returns when it was killed.

    Counts questions, not time: when the whole machine stood still, nobody was silent.
    """
    timeout, unanswered = aiohttp.ClientTimeout(total=interval_s), 0
    connector = aiohttp.UnixConnector(str(path), force_close=True)
    async with aiohttp.ClientSession("http://localhost", connector=connector, timeout=timeout) as session:
        while unanswered < max_unanswered:
            await asyncio.sleep(interval_s)
            unanswered = 0 if await _answers(session) else unanswered + 1
    log.error("router_process_hangs", pid=process.pid, unanswered=unanswered, hint="it is killed and started again")
    if process.returncode is None:
        process.kill()


async def _answers(session: aiohttp.ClientSession) -> bool:
    """Whatever the answer is."""
    try:
        async with session.get("/state"):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False
