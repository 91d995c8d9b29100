"""Streams: what the events of a choice add up to, how large they are, and what comes last."""

import random
from typing import Any

import numpy as np
import pytest

from common.routing.codec import base642numpy
from tests.fakes.fake_workers import Script, description, expected_rows, expected_tokens
from tests.unit.router.cluster import (
    GENERATE,
    Cluster,
    choice_events,
    joined_rows,
    joined_tokens,
    parse_events,
    running,
    split_events,
)

PROMPT = list(range(3, 40))


def assert_row_rule(choices: list[dict[str, Any]], prompt_len: int, start: int) -> None:
    """After an event that brings the total to g tokens there are p - start + g - 1 rows."""
    num_tokens = num_rows = 0
    for choice in choices:
        num_tokens += len(choice["token_ids"])
        if choice["routed_experts"] is not None:
            num_rows += len(base642numpy(choice["routed_experts"]))
        if num_tokens:
            assert num_rows == prompt_len - start + num_tokens - 1
        assert choice["token_ids"] or choice["routed_experts"] or choice["finish_reason"]


def assert_ends_once(choices: list[dict[str, Any]]) -> None:
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("prompt_chunk", [0, 4])
async def test_deltas_join_to_the_whole_answer(chunk_tokens: int, prompt_chunk: int) -> None:
    script = Script(chunk_tokens=chunk_tokens, prompt_chunk=prompt_chunk)
    async with running(script) as cluster:
        sampling = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1, "routed_experts_prompt_start": 5}
        whole = (await cluster.generate(PROMPT, **sampling))["choices"][0]
        events = parse_events(await cluster.stream({"token_ids": PROMPT, "sampling_params": sampling}))
    choices = choice_events(events)
    assert joined_tokens(choices) == whole["token_ids"] == expected_tokens(PROMPT, 30)
    assert [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]] == whole["logprobs"][
        "content"
    ]
    assert [entry["token_id"] for entry in whole["logprobs"]["content"]] == whole["token_ids"]
    rows = joined_rows(choices)
    assert rows is not None
    np.testing.assert_array_equal(rows, base642numpy(whole["routed_experts"]))
    np.testing.assert_array_equal(rows, expected_rows(5, len(PROMPT) + 29, description()))
    assert_row_rule(choices, len(PROMPT), 5)
    assert_ends_once(choices)
    assert choices[-1]["weight_versions"] == whole["weight_versions"]
    assert all(choice["weight_versions"] is None for choice in choices[:-1])


async def test_prompt_rows_go_out_while_prefill_computes() -> None:
    script = Script(prompt_chunk=10, hold_after=4)  # the second token waits for the test
    async with running(script) as cluster:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}, "stream": True}
        async with cluster.http.post(GENERATE, json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert b'"token_ids":[]' in first
            script.release.set()
            events = parse_events(split_events(first + await response.read()))
    choices = choice_events(events)
    assert [len(choice["token_ids"]) for choice in choices] == [0, 0, 0, 1, 1]
    np.testing.assert_array_equal(joined_rows(choices), expected_rows(0, len(PROMPT) + 1, description()))


async def test_final_mode_keeps_rows_for_the_last_event() -> None:
    script = Script(prompt_chunk=8, chunk_tokens=2)
    async with running(script) as cluster:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 7}}
        asked = parse_events(await cluster.stream(body | {"stream_options": {"routed_experts": "final"}}))
    async with running(script, stream_routed_experts="final") as cluster:
        default = parse_events(await cluster.stream(body))
        delta = parse_events(await cluster.stream(body | {"stream_options": {"routed_experts": "delta"}}))
    for events in (asked, default):
        choices = choice_events(events)
        assert [choice["routed_experts"] is not None for choice in choices] == [False, False, False, True]
        np.testing.assert_array_equal(joined_rows(choices), expected_rows(0, len(PROMPT) + 6, description()))
        assert_ends_once(choices)
    assert choice_events(delta)[0]["routed_experts"] is not None


async def test_no_rows_at_all_is_an_empty_array_like_the_whole_answers() -> None:
    async with running() as cluster:
        sampling = {"max_tokens": 1, "routed_experts_prompt_start": len(PROMPT)}
        for mode in ("delta", "final"):
            body = {"token_ids": PROMPT, "sampling_params": sampling, "stream_options": {"routed_experts": mode}}
            choices = choice_events(parse_events(await cluster.stream(body)))
            assert base642numpy(choices[-1]["routed_experts"]).shape == (0, 2, 2)


async def test_choices_never_mix() -> None:
    async with running(Script(chunk_tokens=2), decode=2, prefill=2) as cluster:
        sampling = {"n": 3, "max_tokens": 9, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling, "return_token_ids": True}
        events = parse_events(await cluster.stream(body))
    assert all(len(event["choices"]) == 1 for event in events)
    assert [event["prompt_token_ids"] for event in events] == [PROMPT] + [None] * (len(events) - 1)
    for index in range(3):
        choices = choice_events(events, index)
        assert joined_tokens(choices) == expected_tokens(PROMPT, 9, index)
        np.testing.assert_array_equal(joined_rows(choices), expected_rows(0, len(PROMPT) + 8, description()))
        assert_row_rule(choices, len(PROMPT), 0)
        assert_ends_once(choices)


async def test_usage_events() -> None:
    async with running() as cluster:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
        plain = parse_events(await cluster.stream(body))
        last = parse_events(await cluster.stream(body | {"stream_options": {"include_usage": True}}))
        every = parse_events(await cluster.stream(body | {"stream_options": {"continuous_usage_stats": True}}))
    assert all(event["usage"] is None and event["choices"] for event in plain)
    assert last[-1]["choices"] == []
    usage = last[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (37, 3, 40)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 32}
    assert [event["usage"]["completion_tokens"] for event in every] == [1, 2, 3]


async def test_first_token_that_ends_the_choice_is_one_event() -> None:
    async with running() as cluster:
        body = {"token_ids": [1, 1], "sampling_params": {"max_tokens": 5}}
        (choice,) = choice_events(parse_events(await cluster.stream(body)))
    assert (choice["token_ids"], choice["finish_reason"]) == ([2], "stop")
    assert len(base642numpy(choice["routed_experts"])) == 2


BIG = description(num_layers=48, top_k=8, num_experts=128, max_model_len=16_384, vocab_size=300)


@pytest.mark.parametrize("limit", [4096, 65_536, 131_072])
async def test_events_stay_below_the_limit(limit: int) -> None:
    prompt = [i % 300 for i in range(2000)]
    script = Script(BIG, prompt_chunk=700, chunk_tokens=40)
    async with running(script) as cluster:
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 60, "ignore_eos": True, "logprobs": 20},
            "stream_options": {"max_event_bytes": limit, "continuous_usage_stats": True},
        }
        raw = await cluster.stream(body)
        whole = (await cluster.generate(prompt, max_tokens=60, ignore_eos=True))["choices"][0]
    assert max(len(b"data: " + event + b"\n\n") for event in raw) <= limit
    choices = choice_events(parse_events(raw))
    assert joined_tokens(choices) == whole["token_ids"]
    np.testing.assert_array_equal(joined_rows(choices), base642numpy(whole["routed_experts"]))
    assert_row_rule(choices, 2000, 0)


async def test_default_limit_and_few_needless_events() -> None:
    prompt = [i % 300 for i in range(2000)]
    async with running(Script(BIG)) as cluster:
        raw = await cluster.stream({"token_ids": prompt, "sampling_params": {"max_tokens": 1}})
    # 2000 rows of 384 bytes are 1,024,000 characters of base64: 16 events of 64 KiB, not 17 full ones.
    assert max(len(event) for event in raw) <= 65_536 - 8
    assert len(raw) - 1 == 16


@pytest.mark.parametrize("prompt_len", [243, 247, 1000, 2000, 9800])
async def test_large_lines_pass_whole(prompt_len: int) -> None:
    """Lines of 127 KB to 5 MB, where line readers give up at 128 KiB: the router itself reads none."""
    prompt = [i % 300 for i in range(prompt_len)]
    async with running(Script(BIG)) as cluster:
        body = {
            "token_ids": prompt,
            "sampling_params": {"max_tokens": 1},
            "stream_options": {"routed_experts": "final"},
        }
        raw = await cluster.stream(body)
    (choice,) = choice_events(parse_events(raw))
    np.testing.assert_array_equal(base642numpy(choice["routed_experts"]), expected_rows(0, prompt_len, BIG))


async def test_slow_reader_gets_the_same_rows() -> None:
    """The client reads one event at a time, while the worker could send everything at once."""
    prompt = [i % 300 for i in range(500)]
    async with running(Script(BIG, chunk_tokens=7, prompt_chunk=64)) as cluster:
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 300, "ignore_eos": True}, "stream": True}
        raw = b""
        async with cluster.http.post(GENERATE, json=body) as response:
            while True:
                piece = await response.content.read(1000)
                if not piece:
                    break
                raw += piece
    choices = choice_events(parse_events(split_events(raw)))
    assert joined_tokens(choices) == expected_tokens(prompt, 300)
    np.testing.assert_array_equal(joined_rows(choices), expected_rows(0, 799, BIG))
    assert_row_rule(choices, 500, 0)


async def check_random_request(cluster: Cluster, rng: random.Random) -> None:
    prompt = [rng.randrange(300) for _ in range(rng.randint(1, 100))]
    start = rng.randint(0, len(prompt))
    sampling: dict[str, Any] = {
        "max_tokens": rng.randint(1, 40),
        "temperature": 0,
        "seed": 1,
        "n": rng.randint(1, 2),
        "routed_experts_prompt_start": start,
        "stop_token_ids": rng.sample(range(300), 20),
    }
    options = {"include_usage": True, "max_event_bytes": rng.choice([1024, 1500, 65_536])}
    whole = await cluster.generate(prompt, **sampling)
    body = {"token_ids": prompt, "sampling_params": sampling, "stream_options": options}
    raw = await cluster.stream(body)
    events = parse_events(raw)
    assert max(len(event) for event in raw) + 8 <= options["max_event_bytes"]
    assert events[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    for choice in whole["choices"]:
        streamed = choice_events(events, choice["index"])
        end = len(prompt) + len(choice["token_ids"]) - 1
        assert joined_tokens(streamed) == choice["token_ids"]
        assert streamed[-1]["finish_reason"] == choice["finish_reason"]
        assert streamed[-1]["stop_reason"] == choice["stop_reason"]
        np.testing.assert_array_equal(joined_rows(streamed), expected_rows(start, end, description()))
        np.testing.assert_array_equal(joined_rows(streamed), base642numpy(choice["routed_experts"]))
        assert_row_rule(streamed, len(prompt), start)
        assert_ends_once(streamed)


@pytest.mark.parametrize("seed", range(4))
async def test_random_requests(seed: int) -> None:
    rng = random.Random(seed)
    script = Script(chunk_tokens=rng.randint(1, 6), prompt_chunk=rng.choice([0, 1, 7]))
    async with running(script) as cluster:
        for _ in range(25):
            await check_random_request(cluster, rng)
