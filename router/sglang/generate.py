"""POST /generate and /abort_request: the SGLang dialect."""

import asyncio
from collections.abc import Mapping
from functools import partial

from aiohttp import web

from common.errors import InvalidRequestError, NotFoundError
from router.calls import task_group
from router.generate import GENERATE_ERRORS
from router.job import REQUEST_ID_HEADER
from router.json_answer import json_answer
from router.json_body import read_body
from router.keys import LIVE, METRICS, PIPELINE, PLANNER, SETTINGS, TEXT, UNKNOWN_FIELDS, max_model_len
from router.live import LiveRequest
from router.operation import Operation
from router.serve import Incoming, serve
from router.sglang.answer import SglangDialect, SglangOptions
from router.sglang.ids import CHOICE_IDS, ChoiceRef, choice_ids
from router.sglang.request_schemas import SglangAbortRequest, SglangGenerateRequest, SglangSamplingParams
from router.sglang.response_schemas import SglangAbortAnswer, SglangAnswer, SglangOutput
from router.sglang.translate import (
    ask_of,
    count_prompts,
    is_batch,
    logprob_start,
    prompts_of,
    sglang_names,
)
from router.validate import request_id

ID_PREFIX = "generate"


async def generate(request: web.Request) -> web.StreamResponse:
    """Text or tokens in, both out, and their experts if asked for."""
    app = request.app
    with app[METRICS].request("sglang_generate") as clock:
        body = await read_body(request, SglangGenerateRequest, app[UNKNOWN_FIELDS], app[PLANNER].check_num_prompts)
        sampling, tokenizer = body.sampling_params or SglangSamplingParams(), app[TEXT].tokenizer
        with sglang_names(sampling):
            app[PLANNER].check_fan_out(count_prompts(body), sampling.n, "input_ids" if body.text is None else "text")
            make = partial(prompts_of, body, tokenizer, max_model_len(app))
            prompts = await asyncio.to_thread(make) if body.text else make()
            ask = ask_of(body, sampling, prompts, wants_text=tokenizer is not None)
            rid = body.rid if isinstance(body.rid, str) else None
            name = request_id(request.headers.get(REQUEST_ID_HEADER), rid, ID_PREFIX)
            options = _options(body, sampling, name, len(prompts))
            own_ids = options.ids if options.batch else ()
            with app[CHOICE_IDS].registered(name, own_ids, sampling.n or 1, app[LIVE]):
                incoming = Incoming(ID_PREFIX, name, stream=bool(body.stream))
                dialect = SglangDialect(options, app[SETTINGS].max_event_bytes)
                return await serve(request, clock, incoming, ask, dialect)


def _options(body: SglangGenerateRequest, sampling: SglangSamplingParams, name: str, num_prompts: int) -> SglangOptions:
    batch = is_batch(body, sampling)
    if isinstance(body.rid, list) and not batch:
        raise InvalidRequestError("rid must be one string, because the request has one prompt", param="rid")
    return SglangOptions(
        ids=choice_ids(name, body.rid, num_prompts, sampling.n or 1) if batch else [name],
        batch=batch,
        logprobs=bool(body.return_logprob),
        num_top=body.top_logprobs_num or 0,
        input_start=logprob_start(body),
        text_in_logprobs=bool(body.return_text_in_logprobs),
    )


async def abort_request(request: web.Request) -> web.Response:
    """Ends a request, one choice of a batch, or everything, with finish reason "abort".

    Raises:
        NotFoundError: nothing live has this id.
    """
    body = await read_body(request, SglangAbortRequest, request.app[UNKNOWN_FIELDS])
    if not (body.rid or body.abort_all):
        raise InvalidRequestError("send rid, or abort_all: true", param="rid")
    targets = _targets(request.app, None if body.abort_all else body.rid)
    async with task_group() as group:
        for live, ref in targets.values():
            group.create_task(request.app[PIPELINE].abort(live, None if ref is None else (ref.prompt, ref.choice)))
    answer = SglangAbortAnswer(aborted=list(targets))
    return json_answer(answer)


def _targets(app: web.Application, rid: str | None) -> Mapping[str, tuple[LiveRequest, ChoiceRef | None]]:
    """What an id means, by the id; everything that is live without one."""
    live = app[LIVE]
    if rid is None:
        return {each.request_id: (each, None) for each in live.requests()}
    if found := live.get(rid):
        return {rid: (found, None)}
    ref = app[CHOICE_IDS].get(rid)
    parent = None if ref is None else live.get(ref.request_id)
    if parent is None:
        raise NotFoundError(f"no live request has the id {rid[:512]!r}", param="rid")
    return {rid: (parent, ref)}


OPERATIONS = (
    Operation(
        "post",
        "/generate",
        "Generate as SGLang does.",
        answer=SglangAnswer,
        body=SglangGenerateRequest,
        events=SglangOutput,
        errors=GENERATE_ERRORS,
        examples=(
            {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}, "return_routed_experts": True},
            {"text": "Hello", "sampling_params": {"max_new_tokens": 8}, "return_logprob": True, "stream": True},
        ),
        tag="SGLang",
    ),
    Operation(
        "post",
        "/abort_request",
        "End a request, a choice of a batch, or everything; each answers with what it has.",
        answer=SglangAbortAnswer,
        body=SglangAbortRequest,
        errors=(404,),
        tag="SGLang",
    ),
)
