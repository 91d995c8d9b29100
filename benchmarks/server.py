"""Starts the server under measurement, waits until it serves, and stops it with everything it started."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deploy.ready import wait_until_ready

#: Loading and compiling a model of some gigabytes.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@asynccontextmanager
async def running(command: str) -> AsyncIterator[str]:
    """Runs a command in which `{port}` stands for the port to serve on; yields the URL once GET /health answers 200.

    Raises:
        RuntimeError: the command ended, or did not serve in time.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    # Its output goes to our stderr, because stdout is for the results; a session of its own can be stopped as a whole.
    process = await asyncio.create_subprocess_exec(
        *shlex.split(command.replace("{port}", str(port))), stdout=sys.stderr, start_new_session=True
    )
    try:
        await _wait_until_serving(process, url, command)
        yield url
    finally:
        await _stop(process)


async def _wait_until_serving(process: asyncio.subprocess.Process, url: str, command: str) -> None:
    ready = asyncio.create_task(wait_until_ready(f"{url}/health"))
    ended = asyncio.create_task(process.wait())
    try:
        done, _ = await asyncio.wait((ready, ended), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        ended.cancel()
    if ready not in done:
        reason = f"ended with code {process.returncode}" if ended in done else f"took over {START_TIMEOUT_S:g} s"
        raise RuntimeError(f"{command!r} {reason} before it served")


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM for the process itself, SIGKILL for what is left of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
