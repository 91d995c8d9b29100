"""The router process: bind, announce, serve, drain."""

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from aiohttp import web

from common.config import RouterSettings
from common.errors import UnavailableError
from common.process import drain_or_second_signal, stop_signals, write_ready_file
from router.app import create_app, create_control_app
from router.connections import closing_what_cannot_be_kept
from router.keys import LIVE
from router.listener import CONTROL_PORT_FLAGS, listening
from router.live import LiveRequests

log = structlog.get_logger()


async def serve(settings: RouterSettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains. A second signal ends it at once.

    Raises:
        StartupError: a port cannot be bound, or the configuration is wrong.
    """
    app = create_app(settings)
    async with AsyncExitStack() as listeners:
        address = await listeners.enter_async_context(listening(app, settings.host, settings.port))
        control = await _listen_for_control(listeners, app, settings)

        def announce() -> None:
            log.info("router_listening", address=address, control_address=control)
            if settings.ready_file:
                write_ready_file(settings.ready_file, address, control, tls=settings.ssl_certfile is not None)

        await drain_when_stopped(app, settings, announce)


async def drain_when_stopped(app: web.Application, settings: RouterSettings, announce: Callable[[], None]) -> None:
    """Announces that the router serves, waits for a signal, and lets live requests finish, or ends them in an error."""
    # What a router is made of stays; without this the garbage collector walks through it while streams wait.
    gc.collect()
    gc.freeze()
    with closing_what_cannot_be_kept():
        await _drain_when_stopped(app, settings, announce)


async def _drain_when_stopped(app: web.Application, settings: RouterSettings, announce: Callable[[], None]) -> None:
    async with stop_signals() as stop:
        announce()
        await stop.wait()
        drained = await drain_or_second_signal(_drain(app[LIVE], settings), stop)
        log.info("router_stopping", drained=drained, unfinished=len(app[LIVE]))
        app[LIVE].fail_all(UnavailableError("the router was stopped before the request was finished"))


async def _listen_for_control(listeners: AsyncExitStack, app: web.Application, settings: RouterSettings) -> str | None:
    """HOST:PORT of the control port, if there is to be one."""
    if settings.admin_port is None:
        return None
    control = create_control_app(app)
    return await listeners.enter_async_context(
        listening(control, settings.admin_host, settings.admin_port, CONTROL_PORT_FLAGS)
    )


async def _drain(live: LiveRequests, settings: RouterSettings) -> bool:
    """Says that it is not ready, refuses new requests a while later, lets live ones finish; whether all did in time.

    In between whoever sends requests finds out, and what is under way meanwhile is served.
    """
    live.draining = True
    timeout_s, pre_stop_s = settings.drain_timeout_s, settings.pre_stop_s
    log.info("router_draining", in_flight=len(live), timeout_s=timeout_s, pre_stop_s=pre_stop_s)
    if pre_stop_s:
        await asyncio.sleep(pre_stop_s)
    live.refusing = True
    try:
        async with asyncio.timeout(timeout_s):
            await live.wait_empty()
    except TimeoutError:
        return False
    return True
