"""What a router process answers to its siblings."""

import msgspec
from aiohttp import web

from common.errors import MoerelayError
from router.aborts import abort_here, abort_rid_here
from router.control.routes import CONTROL_ROUTES
from router.keys import FLEET, LIVE, METRICS, SETTINGS, share
from router.middleware import errors_as_json
from router.processes.gauges import Readings, readings
from router.processes.leading import lead
from router.processes.siblings import Aborted, ProcessState


def state_of(app: web.Application) -> ProcessState:
    """Of this process."""
    live = app[LIVE]
    complaint: str | None = None
    if live.draining:
        complaint = "the router is draining"
    else:
        try:
            app[FLEET].model()
        except MoerelayError as error:
            complaint = error.message
    return ProcessState(len(live), live.draining, complaint)


async def _state(request: web.Request) -> web.Response:
    return _json(state_of(request.app))


async def _gauges(request: web.Request) -> web.Response:
    metrics = request.app[METRICS]
    metrics.refresh()
    return _json(readings(metrics.registry))


async def _refresh(request: web.Request) -> web.Response:
    await request.app[FLEET].refresh()
    return web.Response()


async def _abort(request: web.Request) -> web.Response:
    names = msgspec.json.decode(await request.read(), type=list[str])
    return _json(await abort_here(request.app, names))


async def _abort_rid(request: web.Request) -> web.Response:
    rid = msgspec.json.decode(await request.read(), type=str | None)
    return _json(await abort_rid_here(request.app, rid))


def _json(answer: ProcessState | Aborted | Readings) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


def create_local_app(public: web.Application) -> web.Application:
    """The application of the unix socket, over what the public one has; to be started after it."""
    app = web.Application(middlewares=[errors_as_json, lead], client_max_size=public[SETTINGS].max_body_bytes)
    app[SETTINGS] = public[SETTINGS]
    share(public, app)
    app.add_routes(
        [
            web.get("/state", _state),
            web.get("/gauges", _gauges),
            web.post("/refresh", _refresh),
            web.post("/abort", _abort),
            web.post("/abort_rid", _abort_rid),
            *CONTROL_ROUTES,
        ]
    )
    return app
