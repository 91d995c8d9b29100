"""POST /inference/v1/generate and /inference/v1/abort_requests: the vLLM dialect, tokens in and tokens out."""

import asyncio

from aiohttp import web

from common.errors import InvalidRequestError, NotFoundError
from router.aborts import abort_here, ended
from router.answer import GenerateDialect
from router.json_answer import json_answer
from router.json_body import read_body
from router.keys import METRICS, SETTINGS, SIBLINGS, UNKNOWN_FIELDS
from router.metrics import Endpoint
from router.operation import Operation
from router.plan import Ask
from router.request_schemas import AbortRequestsRequest, GenerateRequest
from router.response_schemas import AbortRequestsResponse, GenerateResponse, GenerateStreamResponse
from router.rows_format import RowsForm
from router.serve import Incoming, serve

#: Beginning of the ids that the router makes; vLLM's.
ID_PREFIX = "generate-tokens"


async def generate(request: web.Request) -> web.StreamResponse:
    """Tokens in, tokens (and their experts) out, streamed or whole."""
    return await generate_as(request, endpoint="generate", form=None)


async def generate_as(request: web.Request, *, endpoint: Endpoint, form: RowsForm | None) -> web.StreamResponse:
    """Answers with rows in the given form, or the one that request and server ask for.

    `endpoint` is the metrics' name of the route.
    """
    settings = request.app[SETTINGS]
    with request.app[METRICS].request(endpoint) as clock:
        body = await read_body(request, GenerateRequest, request.app[UNKNOWN_FIELDS])
        refuse_unsupported(body)
        form = form or body.sampling_params.routed_experts_format or settings.routed_experts_format
        ask = Ask([body.token_ids], body.sampling_params, priority=body.priority or 0, cache_salt=body.cache_salt or "")
        incoming = Incoming(ID_PREFIX, body.request_id, body.model, bool(body.stream))
        return await serve(request, clock, incoming, ask, GenerateDialect(body, settings, form))


def refuse_unsupported(body: GenerateRequest) -> None:
    """Raises InvalidRequestError for known fields that cannot be honoured here."""
    if body.kv_transfer_params:
        raise InvalidRequestError("kv_transfer_params must be null or empty", param="kv_transfer_params")
    if body.stream and body.sampling_params.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs are not available with stream: leave one of them out", param="prompt_logprobs"
        )


async def abort_requests(request: web.Request) -> web.Response:
    """Ends live requests with finish reason "abort".

    Raises:
        NotFoundError: none of the ids is live.
        UnavailableError: one was not found, and may be live on a process of this router that does not answer.
        MoerelayError: a worker could not be told; which requests were ended is said.
    """
    body = await read_body(request, AbortRequestsRequest, request.app[UNKNOWN_FIELDS])
    names = list(dict.fromkeys(body.request_ids))
    here, elsewhere = await asyncio.gather(abort_here(request.app, names), request.app[SIBLINGS].abort(names))
    found = ended([here, *elsewhere.said])
    aborted = [name for name in names if name in found]
    unknown = [name for name in names if name not in found]
    if unknown:
        elsewhere.require_all()
    if not aborted:
        raise NotFoundError(f"no live request has the id {', '.join(unknown)[:512]}", param="request_ids")
    return json_answer(AbortRequestsResponse(aborted=aborted, unknown=unknown))


#: What every route that generates may end with, beside what any route may.
GENERATE_ERRORS = (404, 409, 429, 502, 503, 504)

OPERATIONS = (
    Operation(
        "post",
        "/inference/v1/generate",
        "Generate from token ids, with the experts of every position.",
        answer=GenerateResponse,
        body=GenerateRequest,
        events=GenerateStreamResponse,
        errors=GENERATE_ERRORS,
        examples=(
            {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8}},
            {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "n": 2, "logprobs": 1}, "stream": True},
        ),
        tag="generation",
    ),
    Operation(
        "post",
        "/inference/v1/abort_requests",
        "End live requests; each answers with what it has.",
        answer=AbortRequestsResponse,
        body=AbortRequestsRequest,
        errors=(404, 502, 503),
        tag="generation",
    ),
)
