"""GET endpoints: health, readiness, models, the cluster, metrics, version, and what documents the API."""

from importlib.metadata import version

from aiohttp import web

from common.errors import UnavailableError
from common.messages import ROLE_NAMES
from common.pb import worker_pb2
from router.exposition import exposition
from router.fleet import Fleet
from router.json_answer import json_answer
from router.keys import DOCS_PAGE, DOCUMENT, FLEET, LIVE, METRICS, MODEL, SETTINGS, SIBLINGS
from router.operation import Operation
from router.response_schemas import (
    ClusterView,
    HealthResponse,
    LiveResponse,
    ModelCard,
    ModelList,
    RouterView,
    StepTimesView,
    VersionResponse,
    WorkerView,
)
from router.worker import PAUSE_NAMES, Worker

VERSION = version("moerelay")


async def live(_: web.Request) -> web.Response:
    """200 while the process runs."""
    return json_answer(LiveResponse(status="ok"))


async def health(request: web.Request) -> web.Response:
    """200 while there is a pair of workers that can serve, paused or not, or a fallback. Raises UnavailableError."""
    fleet = request.app[FLEET]
    fleet.require_pair()
    return json_answer(HealthResponse(status="ok", exact=fleet.exact(), fallback=fleet.falls_back()))


async def ready(request: web.Request) -> web.Response:
    """As `health`, and 503 while the cluster is paused, from the moment the router drains, and while one of its
    processes does not answer: to that belongs a share of the connections.
    """
    if request.app[LIVE].draining:
        raise UnavailableError("the router is draining")
    request.app[FLEET].model()
    states = await request.app[SIBLINGS].states()
    states.require_all()
    for state in states.said:
        if state.complaint is not None:
            raise UnavailableError(f"another process of this router is not ready: {state.complaint}")
    return await health(request)


async def models(request: web.Request) -> web.Response:
    served = request.app[MODEL]
    known = request.app[FLEET].known_model()
    card = ModelCard(
        id=served.name,
        object="model",
        created=served.created,
        owned_by="moerelay",
        root=served.root,
        parent=None,
        max_model_len=known.max_model_len if known else None,
    )
    return json_answer(ModelList(object="list", data=[card]))


async def cluster(request: web.Request) -> web.Response:
    app = request.app
    others = (await app[SIBLINGS].states()).said
    router = RouterView(
        in_flight=len(app[LIVE]) + sum(state.in_flight for state in others),
        draining=app[LIVE].draining or any(state.draining for state in others),
        ready=not app[LIVE].draining and app[FLEET].can_serve() and all(state.complaint is None for state in others),
        processes=1 + len(others),
        fallback=app[FLEET].falls_back(),
        model=app[MODEL].name,
        version=VERSION,
    )
    return json_answer(ClusterView(router=router, workers=_views(app[FLEET])))


async def metrics(request: web.Request) -> web.Response:
    """Of all processes of this router; one that does not answer is missing in the gauges alone."""
    own, siblings = request.app[METRICS], request.app[SIBLINGS]
    own.refresh()
    text = await exposition(
        own.registry,
        request.app[FLEET],
        request.app[SETTINGS].heartbeat_timeout_s,
        others=(await siblings.gauges()).said,
    )
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def show_version(_: web.Request) -> web.Response:
    return json_answer(VersionResponse(version=VERSION))


async def openapi(request: web.Request) -> web.Response:
    return web.Response(text=request.app[DOCUMENT], content_type="application/json")


async def docs(request: web.Request) -> web.Response:
    return web.Response(text=request.app[DOCS_PAGE], content_type="text/html", charset="utf-8")


def _views(fleet: Fleet) -> list[WorkerView]:
    return [_view(worker, worker.status) if worker.status else _unheard(worker) for worker in fleet.workers]


def _view(worker: Worker, status: worker_pb2.WorkerStatus) -> WorkerView:
    return WorkerView(
        id=worker.id,
        role=ROLE_NAMES.get(status.role),
        address=worker.address,
        source=worker.source,
        pid=status.pid,
        state=worker.state,
        refused=worker.refused,
        running=status.load.running,
        waiting=status.load.waiting,
        handoffs=status.load.handoffs,
        kv_blocks_used=status.load.kv_blocks_used,
        kv_blocks_cached=status.load.kv_blocks_cached,
        kv_blocks_total=status.load.kv_blocks_total,
        weight_version=status.model.weight_version,
        pause=PAUSE_NAMES.get(status.pause),
        sleep_level=status.sleep_level,
        exact=status.exact,
        instance_id=status.instance_id,
        numerics=status.model.numerics,
        kernels=_kernels(status.model.numerics),
        fingerprint=status.model.fingerprint,
        cpus=status.cpus,
        threads=status.threads,
        max_num_batched_tokens=status.max_num_batched_tokens,
        max_num_seqs=status.max_num_seqs,
        step_times=_step_times(status.step_times),
    )


def _kernels(numerics: str) -> str | None:
    """The set of kernels that a numerics fingerprint names: its part kernels=NAME."""
    parts = dict(part.partition("=")[::2] for part in numerics.split())
    return parts.get("kernels")


def _step_times(measured: worker_pb2.StepTimes) -> StepTimesView:
    return StepTimesView(**{name: getattr(measured, name) for name in StepTimesView.model_fields})


def _unheard(worker: Worker) -> WorkerView:
    """A worker that has never answered: its address and side are all that is known."""
    known = {"id": worker.id, "role": worker.side, "address": worker.address, "source": worker.source}
    return WorkerView.model_validate(dict.fromkeys(WorkerView.model_fields) | known | {"state": worker.state})


LIVE_OPERATION = Operation("get", "/live", "The process runs.", answer=LiveResponse)
METRICS_OPERATION = Operation(
    "get", "/metrics", "Prometheus text of the router and its workers.", media_type="text/plain"
)
VERSION_OPERATION = Operation("get", "/version", "Version of moerelay.", answer=VersionResponse)
DOCUMENT_OPERATIONS = (
    Operation("get", "/openapi.json", "This document."),
    Operation("get", "/docs", "This document as a page.", media_type="text/html"),
)

OPERATIONS = (
    LIVE_OPERATION,
    Operation(
        "get",
        "/ready",
        "A pair of workers serves; neither are they paused nor is the router draining.",
        answer=HealthResponse,
        errors=(503,),
    ),
    Operation("get", "/health", "A pair of workers can serve, paused or not.", answer=HealthResponse, errors=(503,)),
    Operation("get", "/v1/models", "The model that is served.", answer=ModelList),
    Operation("get", "/cluster", "Every worker, its state and its load.", answer=ClusterView),
    METRICS_OPERATION,
    VERSION_OPERATION,
    *DOCUMENT_OPERATIONS,
)
