"""Waiting for processes that say themselves when they serve: through a file, then through /ready.

Both are polled: a new process offers nothing else to wait for. The caller sets the deadline and watches for its death.
"""

import asyncio
import json
from pathlib import Path

import aiohttp

from common.errors import StartupError

#: Far below the time that any process needs to start.
_POLL_INTERVAL_S = 0.05
#: One probe; a router that takes longer to answer /ready is not ready.
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


async def read_ready_file(path: Path) -> str:
    """The HOST:PORT that a process reports as JSON `{"address": "HOST:PORT", "pid": n}`, once it serves."""
    while True:
        if (address := _reported_address(path)) is not None:
            return address
        await asyncio.sleep(_POLL_INTERVAL_S)


def _reported_address(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["address"])
    except (FileNotFoundError, json.JSONDecodeError):  # not there, or not written to its end
        return None


async def wait_until_ready(url: str) -> None:
    """Returns when a GET of `url` answers 200. Raises StartupError if `url` is none."""
    async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT, trust_env=False) as session:
        while True:
            if await _answers_200(session, url):
                return
            await asyncio.sleep(_POLL_INTERVAL_S)


async def _answers_200(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.InvalidURL as error:  # no waiting makes it a URL
        raise StartupError(f"the router cannot be probed: {url} is not a URL") from error
    except (aiohttp.ClientError, TimeoutError):
        return False
