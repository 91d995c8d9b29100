"""The aiohttp application: routes, middleware and what lives as long as the process."""

import time
from collections.abc import AsyncIterator

from aiohttp import web

from common.config import RouterSettings
from router import generate, status
from router.defaults import checkpoint_folder, load_defaults
from router.fleet import Fleet
from router.json_body import UnknownFields
from router.keys import (
    FLEET,
    LIVE,
    METRICS,
    MODEL,
    PIPELINE,
    PLANNER,
    SETTINGS,
    UNKNOWN_FIELDS,
    ServedModel,
)
from router.live import LiveRequests
from router.metrics import RouterMetrics
from router.middleware import errors_as_json
from router.pipeline import Pipeline
from router.validate import Planner


def create_app(settings: RouterSettings) -> web.Application:
    """Builds the application; workers are contacted when it starts.

    Raises:
        ConfigError: `--model` is no local directory, or its generation_config.json cannot be used.
    """
    defaults = load_defaults(settings.model, ignore=settings.ignore_generation_config)
    app = web.Application(middlewares=[errors_as_json], client_max_size=settings.max_body_bytes)
    app[SETTINGS] = settings
    app[MODEL] = _served_model(settings)
    app[UNKNOWN_FIELDS] = UnknownFields()
    app[PLANNER] = Planner(settings, defaults)
    app.cleanup_ctx.append(_serving)
    app.add_routes(_ROUTES)
    return app


_ROUTES = [
    web.post("/inference/v1/generate", generate.generate),
    web.post("/inference/v1/abort_requests", generate.abort_requests),
    web.get("/live", status.live),
    web.get("/ready", status.ready),
    web.get("/health", status.health),
    web.get("/v1/models", status.models),
    web.get("/cluster", status.cluster),
    web.get("/metrics", status.metrics),
    web.get("/version", status.show_version),
    web.get("/openapi.json", status.openapi),
]


async def _serving(app: web.Application) -> AsyncIterator[None]:
    """Channels and heartbeats, from start to stop."""
    settings = app[SETTINGS]
    fleet = app[FLEET] = Fleet(settings)
    live = app[LIVE] = LiveRequests()
    metrics = app[METRICS] = RouterMetrics(lambda: len(live), fleet)
    app[PIPELINE] = Pipeline(fleet, connect_timeout_s=settings.connect_timeout_s, on_prefill=metrics.prefilled)
    async with fleet.running():
        yield


def _served_model(settings: RouterSettings) -> ServedModel:
    folder = checkpoint_folder(settings.model).name if settings.model else "moerelay"
    return ServedModel(settings.served_model_name or folder, settings.model, int(time.time()))
