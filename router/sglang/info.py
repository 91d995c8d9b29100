"""What SGLang's clients ask a server about itself."""

import asyncio
from importlib.metadata import version

from aiohttp import web

from common.errors import MoerelayError, UnavailableError
from common.pb import prefill_pb2
from router.chunk import Chunk
from router.json_answer import json_answer
from router.keys import FLEET, LIVE, MODEL, PIPELINE, PLANNER, SETTINGS, TEXT
from router.operation import Operation
from router.plan import Ask, ModelLimits, Plan
from router.request_schemas import SamplingFields
from router.sglang.response_schemas import SglangHealth, SglangModelInfo, SglangServerInfo
from router.validate import request_id

#: A token of an idle cluster takes milliseconds; a busy one may have to finish some steps first.
HEALTH_TIMEOUT_S = 20.0

#: Any id will do: every vocabulary has this one.
HEALTH_PROMPT = [0]

VERSION = version("moerelay")


async def health_generate(request: web.Request) -> web.Response:
    """Generates one token. Raises UnavailableError if that fails, for whatever reason."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT_S):
            await _generate_one(request.app)
    except TimeoutError:
        raise UnavailableError(f"no token within {HEALTH_TIMEOUT_S:g} s") from None
    except MoerelayError as error:
        raise UnavailableError(f"no token could be generated: {error.message}") from error
    return json_answer(SglangHealth(status="ok"))


async def _generate_one(app: web.Application) -> None:
    sampling = SamplingFields(max_tokens=1, temperature=0, return_routed_experts=False)
    name = request_id(None, None, "health")
    plans = app[PLANNER].plan(Ask([HEALTH_PROMPT], sampling), name, ModelLimits.of(app[FLEET].model()))
    with app[LIVE].register(name) as live:
        await app[PIPELINE].run(plans, _Unread(), live, _Unobserved())


class _Unread:
    """What is generated interests nobody."""

    async def take(self, plan: Plan, chunk: Chunk) -> bool:
        return chunk.finish is not None

    def take_now(self, plan: Plan, chunk: Chunk) -> bool:
        return False


class _Unobserved:
    """The probe is no request: where its prompt was computed does not count."""

    def prefilled(self, reply: prefill_pb2.PrefillReply) -> None:
        pass

    def placed(self, took_s: float) -> None:
        pass

    def fell_back(self) -> None:
        pass


async def model_info(request: web.Request) -> web.Response:
    app = request.app
    known = app[FLEET].known_model()
    info = SglangModelInfo(
        model_path=app[MODEL].root,
        tokenizer_path=_tokenizer_path(app),
        is_generation=True,
        preferred_sampling_params=None,
        weight_version=known.weight_version if known else None,
        model_type=known.family if known else None,
        has_image_understanding=False,
        has_audio_understanding=False,
    )
    return json_answer(info)


async def server_info(request: web.Request) -> web.Response:
    app = request.app
    known = app[FLEET].known_model()
    info = SglangServerInfo(
        version=VERSION,
        served_model_name=app[MODEL].name,
        model_path=app[MODEL].root,
        tokenizer_path=_tokenizer_path(app),
        skip_tokenizer_init=app[TEXT].tokenizer is None,
        enable_return_routed_experts=app[SETTINGS].enable_return_routed_experts,
        context_length=known.max_model_len if known else None,
        weight_version=known.weight_version if known else None,
    )
    return json_answer(info)


def _tokenizer_path(app: web.Application) -> str | None:
    return None if app[TEXT].tokenizer is None else app[MODEL].root


OPERATIONS = (
    Operation(
        "get",
        "/health_generate",
        "A token can be generated now.",
        "SGLang",
        answer=SglangHealth,
        errors=(503,),
    ),
    *(
        Operation("get", path, "The model that is served.", "SGLang", answer=SglangModelInfo)
        for path in ("/get_model_info", "/model_info")
    ),
    *(
        Operation("get", path, "Some of the server's settings.", "SGLang", answer=SglangServerInfo)
        for path in ("/get_server_info", "/server_info")
    ),
)
