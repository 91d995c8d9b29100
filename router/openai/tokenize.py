"""POST /tokenize and /detokenize."""

import asyncio
from collections.abc import Sequence

from aiohttp import web
from pydantic import BaseModel

from common.errors import InvalidRequestError
from router.json_body import read_body
from router.keys import FLEET, MODEL, PLANNER, TEXT, UNKNOWN_FIELDS, max_model_len
from router.openai.prompts import THREAD_FROM_TOKENS, decode, encode, render
from router.openai.responses import DetokenizeResponse, TokenizeResponse
from router.openai.schemas import DetokenizeRequest, TokenizeRequest
from router.operation import Operation
from router.text.tokenizer import Tokenizer
from router.validate import check_model_name, tokenizer_or_refusal


async def tokenize(request: web.Request) -> web.Response:
    """The ids of a text, or of the prompt that messages make."""
    check = request.app[PLANNER].check_num_messages
    body = await read_body(request, TokenizeRequest, request.app[UNKNOWN_FIELDS], check)
    check_model_name(body.model, request.app[MODEL].name)
    tokenizer = tokenizer_or_refusal(request.app[TEXT].tokenizer, "prompt" if body.messages is None else "messages")
    tokens = await _tokens(body, tokenizer, request)
    context = max_model_len(request.app)

    def answer() -> bytes:
        return _json(
            TokenizeResponse(
                count=len(tokens),
                max_model_len=context,
                tokens=tokens,
                token_strs=[tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None,
            )
        )

    return _answer(answer() if len(tokens) < THREAD_FROM_TOKENS else await asyncio.to_thread(answer))


async def _tokens(body: TokenizeRequest, tokenizer: Tokenizer, request: web.Request) -> list[int]:
    """Of any number: a client may ask in order to learn how far beyond the context a text is."""
    if body.messages is not None:
        special = bool(body.add_special_tokens)
        tools = request.app[TEXT]
        return await render(body.messages, body, tools, add_special_tokens=special, max_model_len=None)
    special = body.add_special_tokens is not False
    (tokens,) = await encode([body.prompt or ""], tokenizer, add_special_tokens=special, max_model_len=None)
    return tokens


async def detokenize(request: web.Request) -> web.Response:
    """The text of ids, special tokens included."""
    body = await read_body(request, DetokenizeRequest, request.app[UNKNOWN_FIELDS])
    check_model_name(body.model, request.app[MODEL].name)
    tokenizer = tokenizer_or_refusal(request.app[TEXT].tokenizer, "tokens")
    known = request.app[FLEET].known_model()
    _check_known(body.tokens, max(tokenizer.vocab_size, known.vocab_size if known else 0))
    (text,) = await decode([body.tokens], tokenizer, skip_special_tokens=False)
    answer = DetokenizeResponse(prompt=text)
    small = len(body.tokens) < THREAD_FROM_TOKENS
    return _answer(_json(answer) if small else await asyncio.to_thread(_json, answer))


def _check_known(tokens: Sequence[int], vocab_size: int) -> None:
    """Rows that a model has beyond its tokenizer are ids without text; anything above is a mistake."""
    largest = max(tokens, default=-1)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"tokens: token id {largest} is out of vocabulary; ids are below {vocab_size}", param="tokens"
        )


def _json(model: BaseModel) -> bytes:
    return model.model_dump_json().encode()


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


OPERATIONS = (
    Operation(
        "post",
        "/tokenize",
        "Token ids of a text, or of messages.",
        tag="text",
        answer=TokenizeResponse,
        body=TokenizeRequest,
        errors=(404,),
        examples=({"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hi"}]}),
    ),
    Operation(
        "post",
        "/detokenize",
        "Text of token ids.",
        tag="text",
        answer=DetokenizeResponse,
        body=DetokenizeRequest,
        errors=(404,),
        examples=({"tokens": [1, 2, 3]},),
    ),
)
