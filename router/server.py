"""The router process: bind, announce, serve, drain."""

import asyncio

import structlog
from aiohttp import web

from common.config import RouterSettings
from common.errors import StartupError, UnavailableError
from common.process import drain_or_second_signal, host_port, stop_signals, write_ready_file
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
        async with stop_signals() as stop:
            await _bind(runner, settings)
            await stop.wait()
            drained = await drain_or_second_signal(_drain(app[LIVE], settings.drain_timeout_s), stop)
            log.info("router_stopping", drained=drained, unfinished=len(app[LIVE]))
            app[LIVE].fail_all(UnavailableError("the router was stopped before the request was finished"))
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


async def _bind(runner: web.AppRunner, settings: RouterSettings) -> None:
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        listen = host_port(settings.host, settings.port)
        raise StartupError(f"cannot listen on {listen}: {error.strerror}") from error
    address = host_port(settings.host, runner.addresses[0][1])
    log.info("router_listening", address=address)
    if settings.ready_file:
        write_ready_file(settings.ready_file, address)


async def _drain(live: LiveRequests, timeout_s: float) -> bool:
    """Refuses new requests and lets live ones finish; whether all did in time."""
    live.draining = True
    log.info("router_draining", in_flight=len(live), timeout_s=timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            await live.wait_empty()
    except TimeoutError:
        return False
    return True
