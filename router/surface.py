"""The routes of each listener, and what the OpenAPI document says about them."""

from dataclasses import dataclass

from aiohttp import web

from router import generate, skyrl, status
from router.control import routes
from router.control.routes import CONTROL_ROUTES
from router.openai import chat, completions, tokenize
from router.operation import Operation
from router.sglang import generate as sglang
from router.sglang import info as sglang_info


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
        return Surface(self.title, (*self.routes, *CONTROL_ROUTES), (*self.operations, *routes.OPERATIONS))


_DOCUMENT_ROUTES = (web.get("/openapi.json", status.openapi), web.get("/docs", status.docs))

PUBLIC = Surface(
    "moerelay",
    (
        web.post("/inference/v1/generate", generate.generate),
        web.post("/inference/v1/abort_requests", generate.abort_requests),
        web.post("/v1/completions", completions.completions),
        web.post("/v1/chat/completions", chat.chat_completions),
        web.post("/tokenize", tokenize.tokenize),
        web.post("/detokenize", tokenize.detokenize),
        web.post("/skyrl/v1/generate", skyrl.generate),
        web.post("/generate", sglang.generate),
        web.post("/abort_request", sglang.abort_request),
        web.get("/health_generate", sglang_info.health_generate),
        web.get("/get_model_info", sglang_info.model_info),
        web.get("/model_info", sglang_info.model_info),
        web.get("/get_server_info", sglang_info.server_info),
        web.get("/server_info", sglang_info.server_info),
        web.get("/live", status.live),
        web.get("/ready", status.ready),
        web.get("/health", status.health),
        web.get("/v1/models", status.models),
        web.get("/cluster", status.cluster),
        web.get("/metrics", status.metrics),
        web.get("/version", status.show_version),
        *_DOCUMENT_ROUTES,
    ),
    (
        *generate.OPERATIONS,
        *completions.OPERATIONS,
        *chat.OPERATIONS,
        *tokenize.OPERATIONS,
        *skyrl.OPERATIONS,
        *sglang.OPERATIONS,
        *sglang_info.OPERATIONS,
        *status.OPERATIONS,
    ),
)

CONTROL_PATHS = frozenset(route.path for route in CONTROL_ROUTES)

CONTROL = Surface(
    "moerelay control",
    (
        *CONTROL_ROUTES,
        web.get("/live", status.live),
        web.get("/metrics", status.metrics),
        web.get("/version", status.show_version),
        *_DOCUMENT_ROUTES,
    ),
    (
        *routes.OPERATIONS,
        status.LIVE_OPERATION,
        status.METRICS_OPERATION,
        status.VERSION_OPERATION,
        *status.DOCUMENT_OPERATIONS,
    ),
)
