"""POST /v1/completions with `stream`, over fake workers."""

import asyncio
from typing import Any

import numpy as np
import pytest

from common.errors import HandoffTimeoutError
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import joined_rows, joined_tokens, running, split_events, strict_json
from tests.unit.router.openai.vocabulary import CHAT, COMPLETIONS, ids, of_choice, said, stream, text_of


async def test_events_joined_are_the_whole_answer(model: str) -> None:
    """Case 34: one finish reason per choice; case 104: it comes in one event with the last text."""
    body = {"prompt": [100], "max_tokens": 9, "return_token_ids": True}
    async with running(Script(chunk_tokens=2), model=model) as cluster:
        events = await stream(cluster, COMPLETIONS, body)
    choices = of_choice(events)
    assert "".join(choice["text"] for choice in choices) == "héEND!ENx?"
    assert joined_tokens(choices) == expected_tokens([100], 9)
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, None, "length"]
    assert choices[-1]["text"] == "?"
    assert [choice["prompt_token_ids"] for choice in choices] == [[100], None, None, None, None]
    assert [choice["weight_versions"] for choice in choices[:-1]] == [None] * 4
    assert choices[-1]["weight_versions"] == [{"version": "7", "start": 0, "end": 9}]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" and event["usage"] is None for event in events)


@pytest.mark.parametrize("chunk_tokens", [1, 3])
@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"stop": "END"}, "hé"),
        ({"stop": "END", "include_stop_str_in_output": True}, "héEND"),
        ({"stop": "ENT", "max_tokens": 9}, "héEND!ENx?"),
        ({"max_tokens": 2}, "h\N{REPLACEMENT CHARACTER}"),
        ({"max_tokens": 7, "stop": "ENT"}, "héEND!EN"),
        ({"max_tokens": 1}, "h"),
    ],
)
async def test_text_is_cut_as_in_a_whole_answer(
    model: str, extra: dict[str, object], text: str, chunk_tokens: int
) -> None:
    """Cases 4, 35 and 61: no part of a character, and nothing of a stop string before it is decided."""
    async with running(Script(chunk_tokens=chunk_tokens), model=model) as cluster:
        body = {"prompt": [100], **extra}
        _, answer = await cluster.post(body, COMPLETIONS)
        events = await stream(cluster, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    *choices, last = of_choice(events)
    assert "".join(choice["text"] for choice in [*choices, last]) == text == answer["choices"][0]["text"]
    assert all(choice["text"] and not choice["finish_reason"] for choice in choices), "events that say nothing"
    assert last["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert last["stop_reason"] == answer["choices"][0]["stop_reason"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    if "END" in extra.values() and "include_stop_str_in_output" not in extra:
        assert not any("E" in choice["text"] for choice in [*choices, last])


async def test_usage_so_far(model: str) -> None:
    options = {"continuous_usage_stats": True}
    async with running(model=model) as cluster:
        events = await stream(cluster, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}


async def test_choices_of_several_prompts_never_mix(model: str) -> None:
    """Case 102."""
    prompts = [[5, 6], [70, 80, 90]]
    body = {"prompt": prompts, "n": 2, "max_tokens": 4, "return_token_ids": True}
    async with running(model=model) as cluster:
        events = await stream(cluster, COMPLETIONS, body)
    assert all(len(event["choices"]) == 1 for event in events)
    for index in range(4):
        choices = of_choice(events, index)
        tokens = expected_tokens(prompts[index // 2], 4, choice=index % 2)
        assert joined_tokens(choices) == tokens
        assert "".join(choice["text"] for choice in choices) == said(tokens)
        assert choices[0]["prompt_token_ids"] == prompts[index // 2]
        assert [bool(choice["finish_reason"]) for choice in choices] == [False] * (len(choices) - 1) + [True]


async def test_rows_travel_only_if_asked_for(model: str) -> None:
    """And workers are not made to ship them."""
    body: dict[str, Any] = {"prompt": [5] * 9, "max_tokens": 4, "ignore_eos": True}
    async with running(Script(prompt_chunk=4), model=model) as cluster:
        events = await stream(cluster, COMPLETIONS, body)
        assert not cluster.decode[0].decode_requests[0].routing.enabled
        assert not cluster.prefill[0].prefill_requests[0].routing.enabled
    assert joined_rows(of_choice(events)) is None


@pytest.mark.parametrize("mode", ["delta", "final"])
async def test_rows_on_request(model: str, mode: str) -> None:
    body: dict[str, Any] = {"prompt": [5] * 9, "max_tokens": 4, "ignore_eos": True}
    body |= {"stream_options": {"routed_experts": mode}, "return_token_ids": True}
    async with running(Script(prompt_chunk=4), model=model) as cluster:
        choices = of_choice(await stream(cluster, COMPLETIONS, body))
    rows = joined_rows(choices)
    assert rows is not None
    np.testing.assert_array_equal(rows, expected_rows(0, 12, description()))
    assert [choice["prompt_token_ids"] for choice in choices] == [[5] * 9] + [None] * (len(choices) - 1)
    if mode == "final":
        assert all(choice["routed_experts"] is None for choice in choices[:-1])


@pytest.mark.parametrize("options", [{}, {"routed_experts": "delta"}])
async def test_echo_comes_with_the_first_token_of_each_choice(model: str, options: dict[str, str]) -> None:
    """With the prompt's logprobs; offsets go on from event to event as in the whole answer."""
    prompt = ids("abc")
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1, "n": 2, "ignore_eos": True}
    body |= {"return_token_ids": True}
    async with running(Script(prompt_chunk=1), model=model) as cluster:
        _, answer = await cluster.post(body, COMPLETIONS)
        events = await stream(cluster, COMPLETIONS, body | {"stream_options": options})
    for whole in answer["choices"]:
        choices = of_choice(events, whole["index"])
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert whole["text"].startswith("abc")
        first = next(choice for choice in choices if choice["token_ids"])
        assert first["text"].startswith("abc")
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        for name, values in whole["logprobs"].items():
            assert [value for part in parts for value in part[name]] == values
        assert len(whole["logprobs"]["tokens"]) == 6


async def test_echo_makes_no_empty_events(model: str) -> None:
    """The first token, half a letter, has no text of its own: the prompt goes out all the same."""
    async with running(model=model) as cluster:
        body = {"prompt": [107], "max_tokens": 5, "echo": True, "stop": "END"}
        choices = of_choice(await stream(cluster, COMPLETIONS, body))
    assert [choice["text"] for choice in choices] == ["\N{REPLACEMENT CHARACTER}", "é", ""]
    assert choices[-1]["finish_reason"] == "stop"


async def test_streams_of_prompts_alone(model: str) -> None:
    """Case 23, streamed: one event with everything, after those with rows."""
    body = {"prompt": ids("abcd"), "max_tokens": 0, "echo": True, "logprobs": 0}
    async with running(Script(prompt_chunk=2), model=model) as cluster:
        (choice,) = of_choice(await stream(cluster, COMPLETIONS, body))
        rows_too = of_choice(await stream(cluster, COMPLETIONS, body | {"stream_options": {"routed_experts": "delta"}}))
    assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.125, -0.25, -0.375]
    rows = joined_rows(rows_too)
    assert rows is not None
    np.testing.assert_array_equal(rows, expected_rows(0, 4, description()))
    assert "".join(each["text"] for each in rows_too) == "abcd"


async def test_an_error_ends_the_stream_without_a_finish_reason(model: str) -> None:
    script = Script(break_after=2, decode_error=HandoffTimeoutError("too late"))
    async with running(script, model=model) as cluster:
        body = {"prompt": [100], "max_tokens": 9, "stream": True}
        async with cluster.http.post(COMPLETIONS, json=body) as response:
            *events, last = split_events(await response.read())
    assert b'"error"' in last
    assert b"too late" in last
    assert all(b'"finish_reason":null' in event for event in events)


async def test_events_keep_to_their_size(model: str) -> None:
    """Text and logprobs with words count too."""
    body = {
        "prompt": [100],
        "max_tokens": 60,
        "logprobs": 20,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"max_event_bytes": 4096, "routed_experts": "delta"},
    }
    script = Script(chunk_tokens=60)
    async with running(script, model=model) as cluster, cluster.http.post(COMPLETIONS, json=body) as response:
        events = split_events(await response.read())
    assert len(events) > 3
    assert max(len(event) for event in events) <= 4096


async def test_abort_keeps_what_is_there(model: str) -> None:
    """By the id in the events; ids, logprobs and text of equal span."""
    script = Script(hold_after=3)
    body = {"prompt": [100], "max_tokens": 9, "stream": True, "logprobs": 0, "return_token_ids": True}
    async with running(script, model=model) as cluster, cluster.http.post(COMPLETIONS, json=body) as response:
        events = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        request_id = strict_json(events[0].removeprefix(b"data: ").decode())["id"]
        _, answer = await cluster.post({"request_ids": [request_id]}, "/inference/v1/abort_requests")
        assert answer == {"aborted": [request_id], "unknown": []}
        last, done = split_events(await response.read())
    choices = [strict_json(event.removeprefix(b"data: ").decode())["choices"][0] for event in events]
    assert joined_tokens(choices) == [100, 107, 114]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [1, 1, 1]
    (end,) = strict_json(last.decode())["choices"]
    assert (end["finish_reason"], end["text"], end["token_ids"], end["logprobs"]) == ("abort", "", [], None)
    assert done == b"[DONE]"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_abort_before_the_first_token(model: str, path: str) -> None:
    """With what was asked of the prompt, though not all of it was scored."""
    script = Script(hold_after=0)
    body: dict[str, Any] = {"prompt": [100], "logprobs": 0, "echo": True}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    async with running(script, model=model) as cluster:
        streaming = asyncio.create_task(stream(cluster, path, body, headers={"X-Request-Id": "mine"}))
        await cluster.decode[0].wait_until(lambda: bool(cluster.decode[0].live))
        await cluster.post({"request_ids": ["mine"]}, "/inference/v1/abort_requests")
        last = of_choice(await streaming)[-1]
    assert (last["finish_reason"], last["logprobs"]) == ("abort", None)
    assert text_of(last) == ("h" if path == COMPLETIONS else "")
