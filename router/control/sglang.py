"""The control routes by SGLang's names: schemas and mapping, no logic of their own.

What is wrong with an update's request is a 400 with `success` false, as SGLang's clients expect; whatever else goes
wrong looks as on every route.
"""

from typing import Literal

from aiohttp import web
from pydantic import Field

from common.errors import InvalidRequestError
from router.control.cluster import PauseMode
from router.control.keys import CLUSTER_CONTROL
from router.control.options import read_options
from router.json_answer import json_answer
from router.json_body import read_body
from router.keys import FLEET, UNKNOWN_FIELDS
from router.operation import Operation
from router.request_schemas import RequestModel
from router.response_schemas import ResponseModel

TAG = "control, SGLang's names"

#: Nothing is recomputed here: what SGLang would retract keeps its KV, too.
_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}


class PauseGenerationRequest(RequestModel):
    """`retract` does what `in_place` does: live requests are frozen and keep their KV."""

    mode: Literal["abort", "in_place", "retract"] | None = Field(None, description='Default: "abort".')


class UpdateWeightsFromDiskRequest(RequestModel):
    """Checkpoints are safetensors whatever their name, and cached prefixes never outlive the weights."""

    model_path: str = Field(description="Checkpoint directory on the machines of the workers; absolute.")
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool | None = Field(None, description="End live requests; otherwise they go on afterwards.")
    weight_version: str | None = Field(
        None, description="Default: one more than the label in use, if that is a number."
    )
    flush_cache: bool | None = None
    keep_pause: bool | None = Field(None, description="Stay paused afterwards.")


class GenerationResponse(ResponseModel):
    """What was done."""

    message: str
    status: Literal["ok"]


class UpdateWeightsFromDiskResponse(ResponseModel):
    """Whether the weights are in use, and if not, why."""

    success: bool
    message: str
    num_paused_requests: int


class WeightVersionResponse(ResponseModel):
    """Label of the weights in use; null before any worker that could be used has answered."""

    weight_version: str | None


async def pause_generation(request: web.Request) -> web.Response:
    body = await read_options(request, PauseGenerationRequest)
    await request.app[CLUSTER_CONTROL].pause(_MODES[body.mode or "abort"])
    return json_answer(GenerationResponse(message="Generation is paused.", status="ok"))


async def continue_generation(request: web.Request) -> web.Response:
    await request.app[CLUSTER_CONTROL].resume()
    return json_answer(GenerationResponse(message="Generation goes on.", status="ok"))


async def flush_cache(request: web.Request) -> web.Response:
    num_blocks = await request.app[CLUSTER_CONTROL].reset_prefix_cache()
    return web.Response(text=f"Cache flushed: {num_blocks} blocks.\n")


async def update_weights_from_disk(request: web.Request) -> web.Response:
    body = await read_body(request, UpdateWeightsFromDiskRequest, request.app[UNKNOWN_FIELDS])
    try:
        update = await request.app[CLUSTER_CONTROL].update_weights(
            body.model_path,
            body.weight_version,
            mode="abort" if body.abort_all_requests else "keep",
            stay_paused=bool(body.keep_pause),
        )
    except InvalidRequestError as error:
        return json_answer(
            UpdateWeightsFromDiskResponse(success=False, message=error.message, num_paused_requests=0), 400
        )
    message = f"The weights of {body.model_path} are in use as version {update.version}."
    return json_answer(
        UpdateWeightsFromDiskResponse(success=True, message=message, num_paused_requests=update.num_paused_requests)
    )


async def get_weight_version(request: web.Request) -> web.Response:
    served = request.app[FLEET].known_model()
    return json_answer(WeightVersionResponse(weight_version=served.weight_version if served else None))


ROUTES: tuple[web.RouteDef, ...] = (
    web.post("/pause_generation", pause_generation),
    web.post("/continue_generation", continue_generation),
    web.get("/flush_cache", flush_cache),
    web.post("/flush_cache", flush_cache),
    web.post("/update_weights_from_disk", update_weights_from_disk),
    web.get("/get_weight_version", get_weight_version),
)

_ERRORS = (409, 502, 503)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/pause_generation",
        "Stop taking and computing requests.",
        TAG,
        answer=GenerationResponse,
        body=PauseGenerationRequest,
        body_required=False,
        errors=_ERRORS,
    ),
    Operation("post", "/continue_generation", "Serve again.", TAG, answer=GenerationResponse, errors=_ERRORS),
    Operation("get", "/flush_cache", "Forget cached prefixes.", TAG, media_type="text/plain", errors=_ERRORS),
    Operation("post", "/flush_cache", "Forget cached prefixes.", TAG, media_type="text/plain", errors=_ERRORS),
    Operation(
        "post",
        "/update_weights_from_disk",
        "Load a checkpoint on all workers while they serve, and put it to use on all of them.",
        TAG,
        answer=UpdateWeightsFromDiskResponse,
        body=UpdateWeightsFromDiskRequest,
        refusal=UpdateWeightsFromDiskResponse,
        errors=(409, 502, 503),
    ),
    Operation("get", "/get_weight_version", "Label of the weights in use.", TAG, answer=WeightVersionResponse),
)
