"""Text and messages as token ids, away from the event loop where that may take long."""

import asyncio
from collections.abc import Sequence

from common.errors import InvalidRequestError
from router.keys import TextTools
from router.openai.messages import Message
from router.openai.schemas import TemplateFields
from router.text.tokenizer import Tokenizer
from router.validate import tokenizer_or_refusal

#: From this many characters on a text is encoded in a thread: about a millisecond.
THREAD_FROM_CHARS = 4096

#: From this many ids on they are decoded in a thread.
THREAD_FROM_TOKENS = 4096


async def encode(
    texts: Sequence[str], tokenizer: Tokenizer, *, add_special_tokens: bool, max_model_len: int | None
) -> list[list[int]]:
    """Ids of each text. `max_model_len`: the context that each must fit into, if it must.

    Raises:
        InvalidRequestError: for what is no text, or surely too long.
    """
    for text in texts:
        tokenizer.check_fits(text, max_model_len, param="prompt")

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]

    return encode_all() if sum(map(len, texts)) < THREAD_FROM_CHARS else await asyncio.to_thread(encode_all)


async def decode(ids: Sequence[Sequence[int]], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> list[str]:
    """The text of each."""

    def decode_all() -> list[str]:
        return [tokenizer.decode(each, skip_special_tokens) for each in ids]

    return decode_all() if sum(map(len, ids)) < THREAD_FROM_TOKENS else await asyncio.to_thread(decode_all)


async def render(
    messages: Sequence[Message],
    fields: TemplateFields,
    tools: TextTools,
    *,
    add_special_tokens: bool,
    max_model_len: int | None,
) -> list[int]:
    """Ids of the prompt that the chat template makes. `max_model_len`: the context that it must fit into, if it must.

    Raises:
        InvalidRequestError: the cluster has no tokenizer or no template, the template refuses the messages, or they are
            surely too long.
    """
    tokenizer = tokenizer_or_refusal(tools.tokenizer, "messages")
    template = tools.chat_template
    if template is None:
        raise InvalidRequestError(
            "messages need a chat template, and the checkpoint has none; start the router with --chat-template, or "
            "send a prompt to /v1/completions",
            param="messages",
        )
    variables = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}

    def rendered() -> list[int]:
        prompt = template.render(
            [message.as_sent() for message in messages],
            tools=None if fields.tools is None else [tool.as_sent() for tool in fields.tools],
            documents=fields.documents,
            add_generation_prompt=fields.begins_answer,
            continue_final_message=bool(fields.continue_final_message),
            variables=variables | (fields.chat_template_kwargs or {}),
        )
        tokenizer.check_fits(prompt, max_model_len, param="messages")
        return tokenizer.encode(prompt, add_special_tokens, param="messages")

    # Always in a thread: how long a template takes does not depend on the messages' length alone.
    return await asyncio.to_thread(rendered)
