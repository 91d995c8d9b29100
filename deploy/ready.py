"""Waiting for processes that say themselves when they serve: through a file, then through /ready.

Both are polled: a new process offers nothing else to wait for. The caller sets the deadline and watches for its death.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from common.errors import StartupError

#: Far below the time that any process needs to start.
_POLL_INTERVAL_S = 0.05
#: One probe; a router that takes longer to answer /ready is not ready.
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


@dataclass(frozen=True, slots=True)
class Addresses:
    """HOST:PORT of what a process serves; a control port is a router's, if it has one."""

    address: str
    control_address: str | None


async def read_ready_file(path: Path) -> Addresses:
    """What a process reports as JSON, `{"address": "HOST:PORT", "control_address": null, "pid": n}`, once it serves."""
    while True:
        if (addresses := _reported(path)) is not None:
            return addresses
        await asyncio.sleep(_POLL_INTERVAL_S)


def _reported(path: Path) -> Addresses | None:
    try:
        report = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not there, or not written to its end
        return None
    return Addresses(report["address"], report.get("control_address"))


async def wait_until_ready(url: str) -> None:
    """Returns when a GET of `url` answers 200. Raises StartupError if `url` is none.

    A certificate is not looked at: it is for the name that clients use, and the router is our own child.
    """
    async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT, trust_env=False) as session:
        while True:
            if await _answers_200(session, url):
                return
            await asyncio.sleep(_POLL_INTERVAL_S)


async def _answers_200(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, ssl=False) as response:
            return response.status == 200
    except aiohttp.InvalidURL as error:  # no waiting makes it a URL
        raise StartupError(f"the router cannot be probed: {url} is not a URL") from error
    except (aiohttp.ClientError, TimeoutError):
        return False
