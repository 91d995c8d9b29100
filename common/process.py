"""What every moerelay process does around its service: signals, draining, the ready file."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from common.errors import ConfigError

#: A unix socket's path has 108 bytes on Linux and 104 on macOS, its closing zero included.
MAX_SOCKET_PATH_BYTES = 103


@asynccontextmanager
async def stop_signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM and SIGINT set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def drain_or_second_signal(drain: Coroutine[None, None, bool], stop: asyncio.Event) -> bool:
    """Runs `drain` until it is over or a further signal comes; whether it ended with nothing left to do."""
    stop.clear()
    drained, forced = asyncio.create_task(drain), asyncio.create_task(stop.wait())
    await asyncio.wait([drained, forced], return_when=asyncio.FIRST_COMPLETED)
    clean = drained.done() and drained.result()
    for waiter in (drained, forced):
        waiter.cancel()
    await asyncio.gather(drained, forced, return_exceptions=True)
    return clean


def host_port(host: str, port: int) -> str:
    """`HOST:PORT` as gRPC and URLs write it: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host in HOST:PORT, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def write_ready_file(
    path: Path,
    address: str,
    control_address: str | None = None,
    local_address: str | None = None,
    *,
    tls: bool = False,
) -> None:
    """Writes {"address", "control_address", "local_address", "tls", "pid"} in one step, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    partial = path.with_suffix(".partial")
    addresses = {"address": address, "control_address": control_address, "local_address": local_address}
    try:
        partial.write_text(json.dumps({**addresses, "tls": tls, "pid": os.getpid()}))
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path} cannot be written: {error.strerror}; name another file") from error
