"""The router process: bind, announce, serve, drain."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from aiohttp import web

from common.config import RouterSettings
from common.errors import StartupError, UnavailableError
from router.app import create_app
from router.keys import LIVE
from router.live import LiveRequests

#: Handlers that drain may not outlive: what it takes to send an error event to every client.
CLOSING_S = 2.0

#: Longest header that reaches our own checks; longer ones are refused by aiohttp's parser.
MAX_HEADER_BYTES = 64 * 1024

#: Above the 60 s after which common load balancers close an idle connection, so that they close it, not we.
KEEPALIVE_S = 75.0

log = structlog.get_logger()


async def serve(settings: RouterSettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains. A second signal ends it at once.

    Raises:
        StartupError: the port cannot be bound, or the configuration is wrong.
    """
    app = create_app(settings)
    runner = create_runner(app)
    await runner.setup()
    try:
        with _signals() as (stop, force):
            await _bind(runner, settings)
            await stop.wait()
            await _drain(app[LIVE], force, settings.drain_timeout_s)
    finally:
        await runner.cleanup()


def create_runner(app: web.Application) -> web.AppRunner:
    """How the application must be run, in the process and in tests."""
    return web.AppRunner(
        app,
        access_log=None,
        # Without it a client that left would go on occupying both workers.
        handler_cancellation=True,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=CLOSING_S,
        max_field_size=MAX_HEADER_BYTES,
    )


@contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Two events: set by the first SIGTERM or SIGINT, and by the second."""
    stop, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, force
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _bind(runner: web.AppRunner, settings: RouterSettings) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        raise StartupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from error
    port = runner.addresses[0][1]
    log.info("router_listening", host=settings.host, port=port)
    if settings.ready_file:
        _announce(settings.ready_file, f"{settings.host}:{port}")


def _announce(path: Path, address: str) -> None:
    """Written beside and renamed, so that a reader never sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    partial.replace(path)


async def _drain(live: LiveRequests, force: asyncio.Event, timeout_s: float) -> None:
    """Refuses new requests, lets live ones finish, and ends those that outlast the time in a typed error."""
    live.draining = True
    log.info("router_draining", in_flight=len(live))
    waits = [asyncio.ensure_future(live.wait_empty()), asyncio.ensure_future(force.wait())]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    log.info("router_stopping", unfinished=len(live))
    live.fail_all(UnavailableError("the router was stopped before the request was finished"))
