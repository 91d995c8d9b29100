"""What the OpenAI endpoints refuse: always a 400 that names the field, and the service goes on."""

from typing import Any

import pytest

from tests.unit.router.cluster import Cluster, running, strict_json
from tests.unit.router.openai.vocabulary import CHAT, COMPLETIONS

USER = {"role": "user", "content": "a"}


async def _refused(cluster: Cluster, path: str, body: dict[str, Any], param: str) -> str:
    """Whole and streamed alike; nothing reaches a worker."""
    messages: list[str] = []
    for stream in (False, True):
        status, answer = await cluster.post(body | {"stream": stream}, path)
        assert status == 400, (body, answer)
        error = answer["error"]
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400), (body, error)
        messages.append(error["message"])
    assert not cluster.decode[0].decode_requests, body
    assert messages[0] == messages[1]
    return messages[0]


async def _all_refused(model: str, path: str, base: dict[str, Any], cases: dict[str, list[Any]]) -> None:
    async with running(model=model) as cluster:
        for field, values in cases.items():
            for value in values:
                await _refused(cluster, path, base | {field: value}, field)
        await cluster.canary()


#: Fields of both endpoints. Cases 15, 16, 17, 21, 53.
SHARED: dict[str, list[Any]] = {
    "n": [0, -1, 129, 10**6, 1.5, "1", True],
    "temperature": [-1, "nan", True],
    "top_p": [0, 1.0001, -0.1],
    "top_k": [-2, 2**31],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [3, -3],
    "frequency_penalty": [3, -3],
    "repetition_penalty": [0, -1],
    "seed": [2**63, 2**64, 10**20, -(2**63) - 1, "1", 1.0],
    "logit_bias": [{"300": 1}, {"-1": 1}, {"AI": 1}, {"1.0": 1}, {"": 1}, {"5": 101}, {"5": "x"}],
    "stop": ["", [""], ["a"] * 65, ["a"] * 10**5, "a" * 1025, 5],
    "stop_token_ids": [[300], [-1], ["5"]],
    "allowed_token_ids": [[300]],
    "bad_words": [[""], ["a"] * 65],
    "min_tokens": [-1, "1"],
    "max_tokens": [-1, -160, 1.5, "4"],
    "prompt_logprobs": [-2, "1", 1.5],
    "routed_experts_prompt_start": [-1, 64, 2**63, 2**70, "3", 1.5, True],
    "routed_experts_format": ["csv"],
    "priority": [2**63, "1"],
    "cache_salt": ["", "a" * 1025, 5],
    "request_id": ["", "é", "a b", "a" * 257],
    "kv_transfer_params": [{"do_remote_decode": True}],
    "response_format": [
        {"type": "structural_tag"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}},
        "json",
    ],
    "structured_outputs": [{"json": {}, "regex": "a"}, {"regex": "("}],
    "truncate_prompt_tokens": [5],
    "use_beam_search": [True],
    "logprob_token_ids": [[5]],
    "stream_options": ["yes"],
    "echo": ["yes", 1],
}


async def test_fields_of_completions(model: str) -> None:
    own: dict[str, list[Any]] = {
        "logprobs": [-2, 21, 300, 301, 10**9, True],
        "best_of": [0, -1, 2, 129, 10**6],
        "suffix": ["b"],
        "prompt_embeds": ["AAAA"],
    }
    await _all_refused(model, COMPLETIONS, {"prompt": [5, 6]}, SHARED | own | {"max_tokens": [0, -1, 1.5, "4"]})


async def test_fields_of_chat(model: str) -> None:
    own: dict[str, list[Any]] = {
        "max_tokens": [0, -1, 1.5, "4"],
        "max_completion_tokens": [0, -1, "4"],
        "logprobs": [1, "yes"],
        "top_logprobs": [-2, 1, 21],
        "tools": [[], [{"type": "other"}], "f"],
        "tool_choice": ["required", "f", {"type": "function", "function": {"name": "f"}}, 5],
        "functions": [[{"name": "f"}]],
        "chat_template": ["{{ messages }}"],
        "chat_template_kwargs": [{"messages": []}, "a"],
        "documents": ["a"],
    }
    await _all_refused(model, CHAT, {"messages": [USER]}, SHARED | own)


@pytest.mark.parametrize("value", [21, 300, 301, 10**9, -1])
async def test_the_number_of_logprobs_is_bounded_and_named(model: str, value: int) -> None:
    """Case 54: -1 is the whole vocabulary, which is over the default limit."""
    async with running(model=model) as cluster:
        message = await _refused(
            cluster, CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": value}, "top_logprobs"
        )
        assert "at most 20" in message
        assert "top_logprobs" in message
        await _refused(cluster, COMPLETIONS, {"prompt": [5], "logprobs": value}, "logprobs")
        await _refused(cluster, COMPLETIONS, {"prompt": [5], "logprobs": value, "echo": True}, "logprobs")


async def test_prompts(model: str) -> None:
    """Cases 19, 22 and 25: empty in any form, out of the vocabulary, of mixed or wrong types, too long."""
    prompts: list[Any] = [
        "",
        [""],
        [],
        [[]],
        ["a", ""],
        [[5], []],
        [300],
        [5, 300],
        [[5], [300]],
        [-1],
        [2**31],
        [2**63],
        [1.5],
        [True],
        [None],
        [5, "a"],
        ["a", 5],
        [[5], 5],
        5,
        None,
        {"a": 1},
        [5] * 128,
        [5] * 500,
        "a" * 127,
    ]
    await _all_refused(model, COMPLETIONS, {}, {"prompt": prompts})


async def test_many_prompts(model: str) -> None:
    """Case 53: found out before any of them is encoded."""
    async with running(model=model) as cluster:
        message = await _refused(cluster, COMPLETIONS, {"prompt": ["a"] * 10**5}, "prompt")
        assert "128" in message
        assert "100000" in message
        await _refused(cluster, COMPLETIONS, {"prompt": [[5]] * 129}, "prompt")
        await _refused(cluster, COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}, "n")


async def test_messages(model: str) -> None:
    """Case 51: also what the template itself refuses, in its words."""
    messages: list[Any] = [
        [],
        None,
        "hello",
        [{"role": "wizard", "content": "a"}],
        [{"content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "user", "content": "a" * 200}],
    ]
    await _all_refused(model, CHAT, {}, {"messages": messages})
    async with running(model=model) as cluster:
        message = await _refused(cluster, CHAT, {"messages": [{"role": "developer", "content": "a"}]}, "messages")
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        refused = await _refused(cluster, CHAT, {"messages": [image]}, "messages")
    assert "no developers here" in message
    assert "'image_url'" in refused
    assert "valid string" not in refused


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
async def test_fields_that_do_not_go_together(model: str, body: dict[str, Any], param: str) -> None:
    async with running(model=model) as cluster:
        await _refused(cluster, CHAT, {"messages": [USER]} | body, param)
        await _refused(cluster, COMPLETIONS, {"prompt": [5]} | body, param)


async def test_an_open_and_an_answered_message_at_once(model: str) -> None:
    body = {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}
    async with running(model=model) as cluster:
        await _refused(cluster, CHAT, body, "continue_final_message")


async def test_prompt_logprobs_have_no_place_in_a_stream(model: str) -> None:
    async with running(model=model) as cluster:
        for path, body in ((COMPLETIONS, {"prompt": [5]}), (CHAT, {"messages": [USER]})):
            status, answer = await cluster.post(body | {"stream": True, "prompt_logprobs": 0}, path)
            assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
async def test_numbers_that_json_does_not_have(model: str, field: str, value: str) -> None:
    """Case 17; and the refusal itself is JSON."""
    async with running(model=model) as cluster:
        for path, rest in ((COMPLETIONS, '"prompt": [5]'), (CHAT, '"messages": [{"role": "user", "content": "a"}]')):
            async with cluster.http.post(path, data=f'{{{rest}, "{field}": {value}}}'.encode()) as response:
                assert response.status == 400
                strict_json(await response.text())


async def test_unknown_model_and_unknown_fields(model: str) -> None:
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"prompt": [5], "model": "other"}, COMPLETIONS)
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        status, _ = await cluster.post({"prompt": [5], "max_tokens": 1, "metadata": {"a": "b"}}, COMPLETIONS)
        assert status == 200


async def test_nulls_are_absent(model: str) -> None:
    nothing = dict.fromkeys([*SHARED, "logprobs", "best_of", "suffix", "prompt_embeds", "model", "user", "stream"])
    async with running(model=model) as cluster:
        status, answer = await cluster.post({"prompt": [100]} | nothing | {"max_tokens": 2}, COMPLETIONS)
        assert status == 200, answer
        nothing = dict.fromkeys([*SHARED, "logprobs", "top_logprobs", "tools", "tool_choice", "chat_template"])
        status, answer = await cluster.post({"messages": [USER]} | nothing | {"max_tokens": 2}, CHAT)
        assert status == 200, answer
