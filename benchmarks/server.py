"""Starts the server under measurement, waits until it serves, and stops it with everything it started."""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.ready import wait_until_ready

#: Loading and compiling a model of some gigabytes.
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running command: where it serves, its process, and how long it took until it served."""

    url: str
    pid: int
    start_s: float


@asynccontextmanager
async def serving(
    command: Sequence[str], *, extra_env: Mapping[str, str] | None = None, log: Path | None = None
) -> AsyncIterator[Server]:
    """Runs a command in which `{port}` stands for the port to serve on; yields once GET /health answers 200.

    What it prints goes to the file `log`, else to our stderr.

    Raises:
        RuntimeError: the command ended, or did not serve in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    begun = time.perf_counter()
    with contextlib.ExitStack() as stack:
        # stdout is for the results. A session of its own can be stopped as a whole.
        output = stack.enter_context(log.open("ab")) if log else sys.stderr
        process = await asyncio.create_subprocess_exec(
            *(word.replace("{port}", str(port)) for word in command),
            stdout=output,
            stderr=output,
            env={**os.environ, **(extra_env or {})},
            start_new_session=True,
        )
        try:
            await _wait_until_serving(process, url, shlex.join(command), log)
            yield Server(url, process.pid, time.perf_counter() - begun)
        finally:
            await _stop(process)


async def _wait_until_serving(process: asyncio.subprocess.Process, url: str, command: str, log: Path | None) -> None:
    ready = asyncio.create_task(wait_until_ready(f"{url}/health"))
    ended = asyncio.create_task(process.wait())
    try:
        done, _ = await asyncio.wait((ready, ended), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
        ended.cancel()
    if ready not in done:
        reason = f"ended with code {process.returncode}" if ended in done else f"took over {START_TIMEOUT_S:g} s"
        raise RuntimeError(f"{command!r} {reason} before it served" + (f"; see {log}" if log else ""))


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM for the process itself, SIGKILL for what is left of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def stop_servers_on_sigterm() -> None:
    """SIGTERM ends this process like Ctrl-C does: `asyncio.run` leaves every context, and so stops the servers."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
