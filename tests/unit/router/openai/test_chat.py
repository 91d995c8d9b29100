"""POST /v1/chat/completions, streamed and not, over fake workers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.routing.codec import base642numpy
from router.openai.responses import ChatCompletionResponse
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import joined_rows, joined_tokens, running, strict_json
from tests.unit.router.openai.vocabulary import CHAT, chat_ids, content_for, ids, of_choice, said, stream, text_of

HELLO = [{"role": "user", "content": content_for(100)}]
PROMPT = chat_ids(("user", content_for(100)))


async def test_messages_in_a_message_out(model: str) -> None:
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"messages": HELLO, "max_tokens": 5}, CHAT)
        (asked,) = cluster.decode[0].decode_requests
    assert status == 200, answer
    ChatCompletionResponse.model_validate_json(json.dumps(answer))
    assert list(asked.token_ids) == PROMPT
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer["usage"].pop("prompt_tokens_details").keys() == {"cached_tokens"}
    rows = base642numpy(answer["choices"][0].pop("routed_experts"))
    np.testing.assert_array_equal(rows, expected_rows(0, len(PROMPT) + 4, description()))
    assert answer == {
        "object": "chat.completion",
        "model": Path(model).name,
        "system_fingerprint": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "usage": {
            "prompt_tokens": len(PROMPT),
            "total_tokens": len(PROMPT) + 5,
            "completion_tokens": 5,
            "completion_tokens_details": None,
        },
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héEND", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": None,
                "sampling_mask": None,
                "weight_versions": [{"version": "7", "start": 0, "end": 5}],
            }
        ],
    }


async def test_events_joined_are_the_whole_answer(model: str) -> None:
    """The first event names the role and only that; the last text and the finish reason come together (case 104)."""
    body = {"messages": HELLO, "max_tokens": 9, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with running(Script(chunk_tokens=2), model=model) as cluster:
        _, answer = await cluster.post(body, CHAT)
        *events, usage = await stream(cluster, CHAT, body)
    choices = of_choice(events)
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "éE"},
        {"content": "ND!"},
        {"content": "ENx"},
        {"content": "?"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    assert choices[0]["token_ids"] is None
    assert joined_tokens(choices[1:]) == answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 9)
    assert [event["prompt_token_ids"] for event in events] == [PROMPT] + [None] * 5
    assert answer["prompt_token_ids"] == PROMPT
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == 9
    assert usage["usage"]["total_tokens"] == answer["usage"]["total_tokens"] == len(PROMPT) + 9
    assert all(event["object"] == "chat.completion.chunk" and event["usage"] is None for event in events)


async def test_a_choice_without_text_has_a_role_and_an_end(model: str) -> None:
    """Case 6: the first token ends it, here a stop string."""
    body = {"messages": HELLO, "stop": "h"}
    async with running(model=model) as cluster:
        begin, choice = of_choice(await stream(cluster, CHAT, body))
    assert begin["delta"] == {"role": "assistant", "content": ""}
    assert choice["delta"] == {"content": ""}
    assert begin["finish_reason"] is None
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "h")


async def test_held_back_text_makes_no_empty_events(model: str) -> None:
    """Case 61: "EN" may begin the stop string, and is sent when it does not."""
    body = {"messages": HELLO, "stop": "ENT", "max_tokens": 9}
    async with running(model=model) as cluster:
        choices = of_choice(await stream(cluster, CHAT, body))
    contents = [text_of(choice) for choice in choices]
    assert contents == ["", "h", "é", "END", "!", "ENx", "?"]


async def test_logprobs_name_tokens_and_bytes(model: str) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    async with running(model=model) as cluster:
        _, answer = await cluster.post(body, CHAT)
        events = await stream(cluster, CHAT, body)
    begin = {"token": "<|bos|>", "logprob": -0.25, "bytes": list(b"<|bos|>")}
    content = [
        {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": [begin]},
        {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": [begin]},
    ]
    assert answer["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    assert [entry for choice in of_choice(events)[1:] for entry in choice["logprobs"]["content"]] == content


async def test_logprobs_without_alternatives(model: str) -> None:
    async with running(model=model) as cluster:
        body = {"messages": HELLO, "max_tokens": 1, "logprobs": True}
        _, answer = await cluster.post(body, CHAT)
        _, silent = await cluster.post(body | {"logprobs": False, "top_logprobs": 0}, CHAT)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert silent["choices"][0]["logprobs"] is None


async def test_prompt_logprobs(model: str) -> None:
    async with running(model=model) as cluster:
        _, answer = await cluster.post({"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}, CHAT)
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][2] == {str(PROMPT[2]): {"logprob": -0.25, "rank": 1, "decoded_token": "s"}}
    assert len(answer["prompt_logprobs"]) == len(PROMPT)


async def test_choices_of_one_prompt(model: str) -> None:
    body = {"messages": HELLO, "n": 3, "max_tokens": 4, "return_token_ids": True}
    async with running(model=model) as cluster:
        _, answer = await cluster.post(body, CHAT)
        events = await stream(cluster, CHAT, body)
        assert len(cluster.prefill[0].prefill_requests) == 2
    for index in range(3):
        tokens = expected_tokens(PROMPT, 4, choice=index)
        whole = answer["choices"][index]
        assert (whole["token_ids"], whole["message"]["content"]) == (tokens, said(tokens))
        choices = of_choice(events, index)
        assert events[index]["choices"] == choices[:1], "choices begin in their order"
        assert "".join(map(text_of, choices)) == said(tokens)
        assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_max_completion_tokens_wins(model: str) -> None:
    """Case 99: and it is what the prefill worker hears."""
    async with running(model=model) as cluster:
        body = {"messages": HELLO, "max_completion_tokens": 2, "max_tokens": 5}
        _, answer = await cluster.post(body, CHAT)
        assert cluster.prefill[0].prefill_requests[0].sampling.max_tokens == 2
        _, rest = await cluster.post({"messages": HELLO, "ignore_eos": True}, CHAT)
    assert answer["usage"]["completion_tokens"] == 2
    assert rest["usage"]["total_tokens"] == 128


async def test_the_first_token_is_not_held_back(model: str) -> None:
    """Case 99: it arrives while the worker still computes the second one."""
    script = Script(hold_after=1)
    async with running(script, model=model) as cluster:
        body = {"messages": HELLO, "max_tokens": 3, "stream": True}
        async with cluster.http.post(CHAT, json=body) as response:
            await response.content.readuntil(b"\n\n")
            line = await response.content.readline()
            assert not script.release.is_set()
            script.release.set()
            await response.read()
    assert strict_json(line.decode().removeprefix("data: "))["choices"][0]["delta"]["content"] == "h"


@pytest.mark.parametrize("mode", [None, "delta", "final"])
async def test_rows_of_a_stream(model: str, mode: str | None) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 3, "stream_options": {"routed_experts": mode}}
    async with running(Script(prompt_chunk=4), model=model) as cluster:
        choices = of_choice(await stream(cluster, CHAT, body))
        assert cluster.decode[0].decode_requests[0].routing.enabled == (mode is not None)
    rows = joined_rows(choices)
    if mode is None:
        assert rows is None
    else:
        np.testing.assert_array_equal(rows, expected_rows(0, len(PROMPT) + 2, description()))
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(map(text_of, choices)) == "h\N{LATIN SMALL LETTER E WITH ACUTE}"


async def _prompt(model: str, body: dict[str, Any]) -> list[int]:
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"max_tokens": 1, "return_token_ids": True} | body, CHAT)
    assert status == 200, answer
    prompt = answer["prompt_token_ids"]
    assert isinstance(prompt, list)
    return prompt


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            chat_ids(("user", "a\nb")),
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "a"},
                    {"role": "tool", "content": "b", "tool_call_id": "1"},
                ]
            },
            chat_ids(("assistant", "a"), ("tool", "b")),
        ),
        ({"messages": [{"role": "user", "content": ""}]}, chat_ids(("user", ""))),
        ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, [0, *chat_ids(("user", "a"))]),
        (
            {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
            [1, *ids("user\na"), 2, *ids("\n")],
        ),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True},
            [1, *ids("assistant\na")],
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "tool_choice": "auto",
                "chat_template_kwargs": {"shout": "!"},
                "add_generation_prompt": False,
            },
            [1, *ids("user\na"), 2, *ids("\nf!")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                    },
                ]
            },
            chat_ids(("user", "a"), ("assistant", "")),
        ),
    ],
)
async def test_what_the_template_makes(model: str, body: dict[str, Any], prompt: list[int]) -> None:
    assert await _prompt(model, body) == prompt


async def test_echo_repeats_the_message_that_goes_on(model: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "say "}]
    body: dict[str, Any] = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 3}
    async with running(model=model) as cluster:
        _, answer = await cluster.post(body, CHAT)
        events = await stream(cluster, CHAT, body)
    prompt = [*chat_ids(("user", "a")), *ids("say ")]
    expected = "say " + said(expected_tokens(prompt, 3))
    assert answer["choices"][0]["message"]["content"] == expected
    assert "".join(map(text_of, of_choice(events))) == expected


async def test_schema_reaches_the_worker(model: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "answer", "schema": schema, "strict": True}
    body = {"messages": HELLO, "max_tokens": 1, "response_format": {"type": "json_schema", "json_schema": named}}
    async with running(model=model) as cluster:
        status, answer = await cluster.post(body, CHAT)
        assert status == 200, answer
        (asked,) = cluster.decode[0].decode_requests
    assert json.loads(asked.sampling.grammar) == {"grammars": [{"json_schema": schema}]}


async def test_without_a_template_or_a_tokenizer(model_without_template: str) -> None:
    async with running(model=model_without_template) as cluster:
        status, answer = await cluster.post({"messages": HELLO}, CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "--chat-template" in answer["error"]["message"]
    async with running() as cluster:
        status, answer = await cluster.post({"messages": HELLO}, CHAT)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "tokenizer" in answer["error"]["message"]


@pytest.mark.parametrize("field", ["messages", "tools", "documents"])
async def test_conversations_are_bounded(model: str, field: str) -> None:
    """Before any of it is read: a message costs microseconds, and a body has room for a million."""
    entry = {"messages": {"role": "user", "content": "a"}, "tools": {"type": "function"}, "documents": {}}[field]
    async with running(model=model, max_messages=3) as cluster:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | {field: [entry] * 4}
        status, answer = await cluster.post(body, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, field)
        assert "at most 3, got 4" in answer["error"]["message"]
        await cluster.canary()
