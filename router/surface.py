"""The routes of each listener, and what the OpenAPI document says about them."""

from dataclasses import dataclass

from aiohttp import web

from router import generate, status
from router.operation import Operation


@dataclass(frozen=True, slots=True)
class Surface:
    """What one listener serves; every route has its operation, and the other way round."""

    title: str
    routes: tuple[web.RouteDef, ...]
    operations: tuple[Operation, ...]

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(route.path for route in self.routes)

    def with_control(self) -> "Surface":
        """Also the control routes."""
        return Surface(self.title, (*self.routes, *_CONTROL_ROUTES), (*self.operations, *_CONTROL_OPERATIONS))


_CONTROL_ROUTES: tuple[web.RouteDef, ...] = ()
_CONTROL_OPERATIONS: tuple[Operation, ...] = ()

_DOCUMENT_ROUTES = (web.get("/openapi.json", status.openapi), web.get("/docs", status.docs))

PUBLIC = Surface(
    "moerelay",
    (
        web.post("/inference/v1/generate", generate.generate),
        web.post("/inference/v1/abort_requests", generate.abort_requests),
        web.get("/live", status.live),
        web.get("/ready", status.ready),
        web.get("/health", status.health),
        web.get("/v1/models", status.models),
        web.get("/cluster", status.cluster),
        web.get("/metrics", status.metrics),
        web.get("/version", status.show_version),
        *_DOCUMENT_ROUTES,
    ),
    (*generate.OPERATIONS, *status.OPERATIONS),
)

CONTROL_PATHS = frozenset(route.path for route in _CONTROL_ROUTES)

CONTROL = Surface(
    "moerelay control",
    (
        *_CONTROL_ROUTES,
        web.get("/live", status.live),
        web.get("/metrics", status.metrics),
        web.get("/version", status.show_version),
        *_DOCUMENT_ROUTES,
    ),
    (
        *_CONTROL_OPERATIONS,
        status.LIVE_OPERATION,
        status.METRICS_OPERATION,
        status.VERSION_OPERATION,
        *status.DOCUMENT_OPERATIONS,
    ),
)
