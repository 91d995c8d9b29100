"""The official `openai` client, unchanged: `python examples/chat_openai.py [URL] [API_KEY]`.

A streamed chat with logprobs, the experts behind an answer, and an answer that follows a JSON schema.
"""

import argparse
import base64
import io
import json

import numpy as np
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]
SCHEMA = {
    "type": "object",
    "properties": {"polite": {"type": "boolean"}},
    "required": ["polite"],
    "additionalProperties": False,
}


def stream(client: OpenAI, model: str) -> None:
    """Text as it comes; the last event brings the usage."""
    events = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=16,
        temperature=0,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    total = 0.0
    for event in events:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
            if choice.logprobs and choice.logprobs.content:
                total += sum(token.logprob for token in choice.logprobs.content)
        if event.usage:
            print(f"\n{event.usage.completion_tokens} tokens, logprob {total:.2f}")


def show_experts(client: OpenAI, model: str) -> None:
    """What OpenAI's schema does not know is asked for in `extra_body`, and found in `model_extra`."""
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=16, temperature=0, extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    extra = choice.model_extra or {}
    rows = np.load(io.BytesIO(base64.b64decode(extra["routed_experts"])))
    num_tokens = len((answer.model_extra or {})["prompt_token_ids"]) + len(extra["token_ids"])
    assert len(rows) == num_tokens - 1
    print(
        f"rows {rows.shape} (positions, layers, experts per token), weights {extra['weight_versions'][0]['version']!r}"
    )


def follow_schema(client: OpenAI, model: str) -> None:
    """The answer can be nothing but JSON of that schema; only `max_tokens` can cut it off."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Was that polite?"}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}},
    )
    if answer.choices[0].finish_reason == "stop":
        print(f"polite: {json.loads(answer.choices[0].message.content or '')['polite']}")
    else:
        print("the answer was cut off by max_tokens")


def main(url: str, api_key: str) -> None:
    """`url` is the router's, with or without the /v1 that OpenAI's clients are given."""
    client = OpenAI(base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1", api_key=api_key)
    model = client.models.list().data[0].id
    stream(client, model)
    show_experts(client, model)
    follow_schema(client, model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("api_key", metavar="API_KEY", nargs="?", default="none", help="one of --api-key-file")
    arguments = parser.parse_args()
    main(arguments.url, arguments.api_key)
