"""POST /v1/chat/completions."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from common.errors import InvalidRequestError
from router.generate import GENERATE_ERRORS
from router.json_body import read_body
from router.keys import METRICS, PLANNER, SETTINGS, TEXT, UNKNOWN_FIELDS, max_model_len
from router.openai.chat_answer import ChatDialect
from router.openai.completions import grammar
from router.openai.prompts import render
from router.openai.responses import ChatCompletionChunk, ChatCompletionResponse
from router.openai.schemas import ChatCompletionRequest
from router.openai.token_words import TokenWords
from router.operation import Operation
from router.plan import Ask
from router.serve import Incoming, serve

#: Beginning of the ids that the router makes; OpenAI's.
ID_PREFIX = "chatcmpl"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Messages in, the next message out."""
    settings, tools = request.app[SETTINGS], request.app[TEXT]
    with request.app[METRICS].request("chat_completions") as clock, _named_as_in_chat():
        check = request.app[PLANNER].check_num_messages
        body = await read_body(request, ChatCompletionRequest, request.app[UNKNOWN_FIELDS], check)
        prompt = await render(
            body.messages,
            body,
            tools,
            add_special_tokens=bool(body.add_special_tokens),
            max_model_len=max_model_len(request.app),
        )
        ask = Ask(
            [prompt],
            body.sampling(),
            prompt_param="messages",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            wants_text=True,
            grammar=await grammar(request.app, body),
        )
        incoming = Incoming(ID_PREFIX, body.request_id, body.model, bool(body.stream))
        words = TokenWords(tools.tokenizer, bool(body.return_tokens_as_token_ids))
        return await serve(request, clock, incoming, ask, ChatDialect(body, settings, words, body.echoed))


@contextmanager
def _named_as_in_chat() -> Iterator[None]:
    """Here `logprobs` is a switch; their number is another field."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "logprobs" or not error.message.startswith("logprobs must be at most"):
            raise
        raise InvalidRequestError(f"top_{error.message}", param="top_logprobs") from error


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation, as OpenAI and vLLM do.",
        tag="generation",
        answer=ChatCompletionResponse,
        body=ChatCompletionRequest,
        events=ChatCompletionChunk,
        errors=GENERATE_ERRORS,
        examples=(
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8},
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "logprobs": True, "stream": True},
        ),
    ),
)
