"""POST /generate and /abort_request: the SGLang dialect."""

import asyncio
from functools import partial

from aiohttp import web

from common.errors import InvalidRequestError, NotFoundError
from router.aborts import abort_rid_here, ended
from router.auth import GUARD
from router.generate import GENERATE_ERRORS
from router.job import REQUEST_ID_HEADER
from router.json_answer import json_answer
from router.json_body import read_body
from router.keys import LIVE, METRICS, PLANNER, SETTINGS, SIBLINGS, TEXT, UNKNOWN_FIELDS, max_model_len
from router.operation import Operation
from router.serve import Incoming, serve
from router.sglang.answer import SglangDialect, SglangOptions
from router.sglang.ids import CHOICE_IDS, choice_ids
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
        AuthenticationError: "everything" is for administrators, where clients have keys.
        NotFoundError: nothing live has this id.
        UnavailableError: it may be live on a process of this router that does not answer.
        MoerelayError: a worker could not be told; which requests were ended is said.
    """
    body = await read_body(request, SglangAbortRequest, request.app[UNKNOWN_FIELDS])
    if not (body.rid or body.abort_all):
        raise InvalidRequestError("send rid, or abort_all: true", param="rid")
    if body.abort_all:
        request.app[GUARD].check_administrator(request, "abort_all")
    rid = None if body.abort_all else body.rid
    here, elsewhere = await asyncio.gather(abort_rid_here(request.app, rid), request.app[SIBLINGS].abort_rid(rid))
    aborted = ended([here, *elsewhere.said])
    if rid is None or not aborted:
        elsewhere.require_all()
    if rid is not None and not aborted:
        raise NotFoundError(f"no live request has the id {rid[:512]!r}", param="rid")
    return json_answer(SglangAbortAnswer(aborted=aborted))


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
        errors=(404, 502, 503),
        tag="SGLang",
    ),
)
