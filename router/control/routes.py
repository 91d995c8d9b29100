"""The control routes, by vLLM's names: a thin layer over `ClusterControl`."""

from collections.abc import AsyncIterator
from urllib.parse import unquote, urlsplit

from aiohttp import web
from pydantic import BaseModel

from common.errors import InvalidRequestError
from router.control import sglang
from router.control.cluster import ClusterControl, PauseMode
from router.control.keys import CLUSTER_CONTROL
from router.control.options import read_options
from router.control.schemas import (
    PausedResponse,
    PauseOptions,
    ResetCacheResponse,
    SleepingResponse,
    SleepOptions,
    StatusResponse,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WakeOptions,
    WeightInfoResponse,
    WorkerWeights,
)
from router.json_answer import json_answer
from router.json_body import read_body
from router.keys import FLEET, UNKNOWN_FIELDS
from router.operation import Operation

TAG = "control"


async def controlling(app: web.Application) -> AsyncIterator[None]:
    """Cleanup context of the application that owns the fleet; after the one that makes it."""
    control = app[CLUSTER_CONTROL] = ClusterControl(app[FLEET])
    yield
    await control.close()


async def pause(request: web.Request) -> web.Response:
    options = await read_options(request, PauseOptions)
    clear_cache = options.clear_cache is not False
    await request.app[CLUSTER_CONTROL].pause(_mode(options), clear_cache=clear_cache)
    return json_answer(StatusResponse(status="paused"))


def _mode(options: PauseOptions) -> PauseMode:
    """Raises InvalidRequestError if the two spellings contradict each other."""
    if options.wait_for_inflight_requests and options.mode not in (None, "wait"):
        raise InvalidRequestError(
            f"wait_for_inflight_requests means mode wait, but mode is {options.mode!r}", param="mode"
        )
    return options.mode or ("wait" if options.wait_for_inflight_requests else "abort")


async def resume(request: web.Request) -> web.Response:
    await request.app[CLUSTER_CONTROL].resume()
    return json_answer(StatusResponse(status="resumed"))


async def is_paused(request: web.Request) -> web.Response:
    return json_answer(PausedResponse(is_paused=await request.app[CLUSTER_CONTROL].is_paused()))


async def update_weights(request: web.Request) -> web.Response:
    body = await read_body(request, UpdateWeightsRequest, request.app[UNKNOWN_FIELDS])
    control = request.app[CLUSTER_CONTROL]
    update = await control.update_weights(_path(body), body.version, mode=body.mode or "keep")
    return json_answer(
        UpdateWeightsResponse(
            version=update.version, fingerprint=update.fingerprint, num_paused_requests=update.num_paused_requests
        )
    )


def _path(body: UpdateWeightsRequest) -> str:
    """Raises InvalidRequestError unless there is one path, on the workers' file systems."""
    if (body.path is None) == (body.uri is None):
        raise InvalidRequestError("give either path or uri", param="path")
    if body.path is not None:
        return body.path
    parts = urlsplit(body.uri or "")
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise InvalidRequestError(f"uri must be file:///PATH, got {(body.uri or '')[:200]!r}", param="uri")
    return unquote(parts.path)


async def weight_info(request: web.Request) -> web.Response:
    control = request.app[CLUSTER_CONTROL]
    workers = [worker.described for worker in await control.workers()]
    served = request.app[FLEET].known_model()
    views = [
        WorkerWeights(
            id=status.worker_id,
            version=status.model.weight_version,
            fingerprint=status.model.fingerprint,
            staged_version=status.staged_version or None,
        )
        for status in workers
    ]
    info = WeightInfoResponse(
        version=served.weight_version if served else None,
        fingerprint=served.fingerprint if served else None,
        consistent=len({(view.version, view.fingerprint) for view in views}) == 1,
        num_updates=control.num_updates,
        workers=views,
    )
    return json_answer(info)


async def reset_prefix_cache(request: web.Request) -> web.Response:
    num_blocks = await request.app[CLUSTER_CONTROL].reset_prefix_cache()
    return json_answer(ResetCacheResponse(status="reset", num_blocks=num_blocks))


async def sleep(request: web.Request) -> web.Response:
    options = await read_options(request, SleepOptions)
    await request.app[CLUSTER_CONTROL].sleep(options.level or 1, options.mode or "abort")
    return json_answer(StatusResponse(status="asleep"))


async def wake_up(request: web.Request) -> web.Response:
    options = await read_options(request, WakeOptions, repeated=frozenset({"tags"}))
    await request.app[CLUSTER_CONTROL].wake_up(resume=options.tags is None or set(options.tags) != {"weights"})
    return json_answer(StatusResponse(status="awake"))


async def is_sleeping(request: web.Request) -> web.Response:
    level = await request.app[CLUSTER_CONTROL].sleep_level()
    return json_answer(SleepingResponse(is_sleeping=level > 0, level=level))


CONTROL_ROUTES: tuple[web.RouteDef, ...] = (
    web.post("/pause", pause),
    web.post("/resume", resume),
    web.get("/is_paused", is_paused),
    web.post("/update_weights", update_weights),
    web.get("/weight_info", weight_info),
    web.post("/reset_prefix_cache", reset_prefix_cache),
    web.post("/sleep", sleep),
    web.post("/wake_up", wake_up),
    web.get("/is_sleeping", is_sleeping),
    *sglang.ROUTES,
)

#: No worker is reached; one went away; the cluster's state or another operation does not allow it.
_ERRORS = (409, 502, 503)


def _with_options(path: str, summary: str, answer: type[BaseModel], options: type[BaseModel]) -> Operation:
    return Operation(
        "post", path, summary, TAG, answer=answer, body=options, body_required=False, query=options, errors=_ERRORS
    )


OPERATIONS: tuple[Operation, ...] = (
    _with_options("/pause", "Stop taking and computing requests.", StatusResponse, PauseOptions),
    Operation("post", "/resume", "Serve again.", TAG, answer=StatusResponse, errors=_ERRORS),
    Operation("get", "/is_paused", "Whether the cluster is paused.", TAG, answer=PausedResponse, errors=(503,)),
    Operation(
        "post",
        "/update_weights",
        "Load a checkpoint on all workers while they serve, and put it to use on all of them.",
        TAG,
        answer=UpdateWeightsResponse,
        body=UpdateWeightsRequest,
        errors=(409, 500, 502, 503),
    ),
    Operation("get", "/weight_info", "The weights in use.", TAG, answer=WeightInfoResponse, errors=(503,)),
    Operation("post", "/reset_prefix_cache", "Forget cached prefixes.", TAG, answer=ResetCacheResponse, errors=_ERRORS),
    _with_options("/sleep", "Pause, and give memory back.", StatusResponse, SleepOptions),
    _with_options("/wake_up", "Take the memory again, and serve.", StatusResponse, WakeOptions),
    Operation("get", "/is_sleeping", "Whether the workers sleep.", TAG, answer=SleepingResponse, errors=(503,)),
    *sglang.OPERATIONS,
)
