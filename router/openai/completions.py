"""POST /v1/completions."""

from collections.abc import Sequence

from aiohttp import web

from router.generate import GENERATE_ERRORS
from router.json_body import read_body
from router.keys import GRAMMARS, METRICS, PLANNER, SETTINGS, TEXT, UNKNOWN_FIELDS, max_model_len
from router.openai.completion_answer import CompletionDialect
from router.openai.fields import OpenAIRequest
from router.openai.prompts import decode, encode
from router.openai.responses import CompletionResponse, CompletionStreamResponse
from router.openai.schemas import CompletionRequest
from router.openai.token_words import TokenWords
from router.operation import Operation
from router.plan import Ask
from router.serve import Incoming, serve
from router.text.tokenizer import Tokenizer
from router.validate import tokenizer_or_refusal

#: Beginning of the ids that the router makes; OpenAI's.
ID_PREFIX = "cmpl"


async def completions(request: web.Request) -> web.StreamResponse:
    """Text or token ids in; text, and if asked for ids and experts, out."""
    settings, tokenizer = request.app[SETTINGS], request.app[TEXT].tokenizer
    with request.app[METRICS].request("completions") as clock:
        planner = request.app[PLANNER]
        body = await read_body(request, CompletionRequest, request.app[UNKNOWN_FIELDS], planner.check_num_prompts)
        planner.check_fan_out(len(body.texts or body.ids), body.n, "prompt")
        prompts = await _token_ids(body, tokenizer, max_model_len(request.app))
        ask = Ask(
            prompts,
            body.sampling(),
            prompt_param="prompt",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            wants_text=tokenizer is not None,
            grammar=await grammar(request.app, body),
            prompt_only=body.max_tokens == 0,
        )
        incoming = Incoming(ID_PREFIX, body.request_id, body.model, bool(body.stream))
        words = TokenWords(tokenizer, bool(body.return_tokens_as_token_ids))
        echoes = await _texts(body, tokenizer) if body.echo else None
        return await serve(request, clock, incoming, ask, CompletionDialect(body, settings, words, echoes))


async def grammar(app: web.Application, body: OpenAIRequest) -> str | None:
    """What `response_format` demands. Raises InvalidRequestError if it cannot be met."""
    wanted = body.wanted_format
    if wanted is None:
        return None
    tokenizer_or_refusal(app[TEXT].tokenizer, "response_format")
    return await app[GRAMMARS].grammar("response_format", wanted.model_dump(by_alias=True))


async def _token_ids(
    body: CompletionRequest, tokenizer: Tokenizer | None, max_model_len: int | None
) -> Sequence[Sequence[int]]:
    if body.ids:
        return body.ids
    known = tokenizer_or_refusal(tokenizer, "prompt")
    special = body.add_special_tokens is not False
    return await encode(body.texts, known, add_special_tokens=special, max_model_len=max_model_len)


async def _texts(body: CompletionRequest, tokenizer: Tokenizer | None) -> list[str]:
    """The prompts as the answer echoes them: as they were sent, or decoded; nothing if there is no tokenizer."""
    if body.texts:
        return body.texts
    if tokenizer is None:
        return [""] * len(body.ids)
    return await decode(body.ids, tokenizer, skip_special_tokens=not body.writes_special_tokens)


OPERATIONS = (
    Operation(
        "post",
        "/v1/completions",
        "Complete text or token ids, as OpenAI and vLLM do.",
        tag="generation",
        answer=CompletionResponse,
        body=CompletionRequest,
        events=CompletionStreamResponse,
        errors=GENERATE_ERRORS,
        examples=(
            {"prompt": "Hello", "max_tokens": 8},
            {"prompt": [1, 2, 3], "max_tokens": 8, "logprobs": 1, "echo": True, "stream": True},
        ),
    ),
)
