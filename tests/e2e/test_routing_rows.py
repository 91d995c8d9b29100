"""The row contract on a real disaggregated cluster. Numbers in docstrings refer to public reports of the same fault."""

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from tests.e2e.cluster import UNTIL_S, Answer, Client, Cluster, JsonObject, decode_rows, request_body, sse_events
from tests.e2e.oracle import assert_equals_solo

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("disaggregated")]

#: Lengths around the block size of 16.
LENGTHS = (1, 2, 15, 16, 17, 32, 33)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(4, 300) for _ in range(length)]


@pytest.mark.parametrize("max_tokens", [1, 2, 16])
@pytest.mark.parametrize("length", LENGTHS)
async def test_row_counts_and_deltas(client: Client, solo: SoloRunner, length: int, max_tokens: int) -> None:
    """Exactly p + g - 1 rows; deltas concatenate to the whole array; `final` brings it on the terminal event.

    vllm-project/vllm#28284, sgl-project/sglang#20964, #7147.
    """
    prompt = prompt_of(length)
    plain = await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
    delta = await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, stream=True)
    final = await client.generate(
        prompt, max_tokens=max_tokens, ignore_eos=True, stream=True, stream_options={"routed_experts": "final"}
    )
    assert_equals_solo(plain, solo, prompt, max_tokens=max_tokens, ignore_eos=True)
    assert plain.rows.shape == (length + max_tokens - 1, 2, 2)
    assert plain.rows.dtype == np.uint8
    assert plain.usage is not None
    assert plain.usage["completion_tokens"] == max_tokens == len(plain.token_ids)
    for streamed in (delta, final):
        assert streamed.token_ids == plain.token_ids
        assert np.array_equal(streamed.rows, plain.rows)
        assert streamed.finish_reason == plain.finish_reason == "length"
    assert [rows for _, rows in final.spans[:-1]] == [0] * (len(final.spans) - 1)
    assert_delta_rule(delta, length)


def assert_delta_rule(answer: Answer, prompt_length: int, start: int = 0) -> None:
    """After an event that brings the total to g >= 1 tokens there are p - start + g - 1 rows."""
    for num_tokens, num_rows in answer.spans:
        if num_tokens:
            assert num_rows == prompt_length - start + num_tokens - 1
        else:
            assert num_rows <= prompt_length - start


async def test_prompt_rows_travel_from_prefill_to_decode(client: Client, solo: SoloRunner) -> None:
    """D computes no prompt token, bytes arrive, and the rows are right although D's free blocks hold NaN.

    llm-d/llm-d-router#1473, #2855, vllm-project/vllm#55584.
    """
    await client.generate(prompt_of(60, seed=1), max_tokens=8)
    before = [
        await client.metric(f"moerelay_{name}_total", "decode") for name in ("prompt_tokens_computed", "handoff_bytes")
    ]
    prompt = prompt_of(37)
    answer = await client.generate(prompt, max_tokens=8, ignore_eos=True)
    after = [
        await client.metric(f"moerelay_{name}_total", "decode") for name in ("prompt_tokens_computed", "handoff_bytes")
    ]
    assert len(answer.rows) == 44
    assert_equals_solo(answer, solo, prompt, max_tokens=8, ignore_eos=True)
    assert after[0] == before[0]
    # 37 tokens of fp32 K and V in 2 layers are more than their routing rows alone.
    assert after[1] - before[1] > 37 * 2 * 2


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
async def test_slow_readers_get_tokens_and_rows_together(client: Client, solo: SoloRunner, pause_s: float) -> None:
    """vllm-project/vllm#37094: chunks that coalesce behind a slow reader keep tokens and rows of equal span."""
    prompt = prompt_of(20)
    answer = Answer(200)
    body = request_body(prompt, stream=True, max_tokens=30, ignore_eos=True)
    async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
        async for event in sse_events(response):
            await asyncio.sleep(pause_s)  # the slow reader itself, not a way to wait for something
            if event != "[DONE]":
                answer.take(json.loads(event)["choices"][0])
    assert_delta_rule(answer, 20)
    assert_equals_solo(answer, solo, prompt, max_tokens=30, ignore_eos=True)


async def test_one_token_needs_no_decode_step(client: Client) -> None:
    """sgl-project/sglang#7147: the token that prefill sampled is the only one, and D runs no step for it."""
    before = await client.metric("moerelay_engine_steps_total", "decode")
    for stream in (False, True):
        answer = await client.generate(
            prompt_of(9), max_tokens=1, stream=stream, ignore_eos=True, stream_options={"include_usage": True}
        )
        assert (len(answer.token_ids), answer.finish_reason, len(answer.rows)) == (1, "length", 9)
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == 1
    assert await client.metric("moerelay_engine_steps_total", "decode") == before


@pytest.mark.parametrize(
    ("fields", "stop_reason"),
    [({"logit_bias": {"2": 100}}, None), ({"logit_bias": {"77": 100}, "stop_token_ids": [77]}, 77)],
    ids=["eos", "stop id"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_first_token_may_end_the_request(
    client: Client, fields: dict[str, object], stop_reason: int | None, stream: bool
) -> None:
    """sgl-project/sglang#12151: an end that prefill already sampled is an end."""
    before = await client.metric("moerelay_engine_steps_total", "decode")
    answer = await client.generate(prompt_of(21), max_tokens=20, stream=stream, **fields)
    assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (1, "stop", stop_reason)
    assert len(answer.rows) == 21
    assert await client.metric("moerelay_engine_steps_total", "decode") == before


async def test_prompt_start(client: Client) -> None:
    """vllm-project/vllm#56844: every legal start gives the tail of the whole array, every other one is a 400."""
    prompt = prompt_of(10)
    whole = await client.generate(prompt, max_tokens=4, ignore_eos=True)
    for start in (0, 1, 9, 10):
        for stream in (False, True):
            answer = await client.generate(
                prompt, max_tokens=4, ignore_eos=True, stream=stream, routed_experts_prompt_start=start
            )
            assert np.array_equal(answer.rows, whole.rows[start:])
    for illegal in (11, -1, 2**63, 2**70, "3", 1.5, True):
        refused = await client.generate(prompt, max_tokens=4, routed_experts_prompt_start=illegal)
        assert refused.status == 400
        assert refused.error is not None
        assert "routed_experts_prompt_start" in refused.error["param"]
    absent = await client.generate(prompt, max_tokens=4, ignore_eos=True, routed_experts_prompt_start=None)
    assert np.array_equal(absent.rows, whole.rows)


async def test_rows_look_like_routing(client: Client) -> None:
    """vllm-project/vllm#54730, sgl-project/sglang#12162: never all zeros, distinct ids, not one row for all tokens."""
    answers = await asyncio.gather(
        *(client.generate(prompt_of(30, i), max_tokens=24, ignore_eos=True) for i in range(4))
    )
    for answer in answers:
        ordered = np.sort(answer.rows, axis=-1)
        assert (ordered[..., 1:] != ordered[..., :-1]).all()
        assert answer.rows.max() < 8
        for layer in range(2):
            assert len(np.unique(answer.rows[:, layer])) >= 3
        generated = answer.rows[30:]
        assert len({row.tobytes() for row in generated}) > 1


async def test_first_logprob_comes_from_prefill(client: Client, solo: SoloRunner) -> None:
    """NVIDIA/TensorRT-LLM#11727: as many logprobs as tokens, the first one included, in streams too."""
    prompt = prompt_of(18)
    plain = await client.generate(prompt, max_tokens=6, logprobs=3, ignore_eos=True)
    streamed = await client.generate(prompt, max_tokens=6, logprobs=3, ignore_eos=True, stream=True)
    assert [entry["token_id"] for entry in plain.logprobs] == plain.token_ids
    assert plain.logprobs == streamed.logprobs
    assert_equals_solo(plain, solo, prompt, max_tokens=6, logprobs=3, ignore_eos=True)


async def test_choices_of_one_request(client: Client, solo: SoloRunner) -> None:
    """ai-dynamo/dynamo#9509: every event names its choice, and every choice has its own complete rows."""
    prompt = prompt_of(12)
    fields: JsonObject = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    plain = await client.generate_n(prompt, **fields)
    streamed = await client.generate_n(prompt, stream=True, **fields)
    assert len({tuple(a.token_ids) for a in plain}) > 1
    for index, (one, two) in enumerate(zip(plain, streamed, strict=True)):
        assert one.token_ids == two.token_ids
        assert np.array_equal(one.rows, two.rows)
        assert_equals_solo(one, solo, prompt, choice=index, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)


async def test_random_requests_stream_equals_plain(client: Client, solo: SoloRunner) -> None:
    """vllm-project/vllm-ascend#16941: token counts, usage and streams agree over 100 random requests, 16 at a time."""
    rng = random.Random(3)
    gate = asyncio.Semaphore(16)

    async def one(index: int) -> None:
        prompt = prompt_of(rng.randrange(1, 70), seed=index)
        fields: JsonObject = {
            "max_tokens": rng.randrange(1, 20),
            "temperature": rng.choice([0.0, 0.7, 1.3]),
            "seed": rng.randrange(-(2**63), 2**63),
            "top_k": rng.choice([0, 5]),
            "top_p": rng.choice([1.0, 0.8]),
            "min_p": rng.choice([0.0, 0.05]),
            "logprobs": rng.choice([None, 0, 2]),
        }
        async with gate:
            plain = await client.generate(prompt, **fields)
            streamed = await client.generate(prompt, stream=True, stream_options={"include_usage": True}, **fields)
        assert_equals_solo(plain, solo, prompt, **fields)
        assert streamed.token_ids == plain.token_ids
        assert np.array_equal(streamed.rows, plain.rows)
        assert streamed.logprobs == plain.logprobs
        for answer in (plain, streamed):
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == len(plain.token_ids)
            assert answer.usage["prompt_tokens"] == len(prompt)

    async with asyncio.TaskGroup() as group:
        for index in range(100):
            group.create_task(one(index))


async def test_partial_blocks_under_concurrency(client: Client, solo: SoloRunner) -> None:
    """vllm-project/vllm-ascend#10253: 32 at once with partly filled last blocks, free blocks full of NaN."""
    prompts = [prompt_of(length, seed) for seed in range(6) for length in (1, 15, 16, 17, 31, 33)][:32]
    answers = await asyncio.gather(*(client.generate(p, max_tokens=6, logprobs=0, ignore_eos=True) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_equals_solo(answer, solo, prompt, max_tokens=6, logprobs=0, ignore_eos=True)


async def test_longest_prompt_in_small_chunks(client: Client, solo: SoloRunner) -> None:
    """sgl-project/sglang#26860, vllm-project/vllm#20409: far more tokens than one step may hold, up to the context."""
    for length in (100, 127):
        prompt = prompt_of(length)
        answer = await client.generate(prompt, max_tokens=1, ignore_eos=True)
        assert_equals_solo(answer, solo, prompt, max_tokens=1, ignore_eos=True)
    refused = await client.generate(prompt_of(128), max_tokens=1)
    assert refused.status == 400
    assert refused.error is not None
    assert "128" in refused.error["message"]


def test_decode_rows_is_strict() -> None:
    """The tests' own decoder refuses what it should."""
    with pytest.raises(ValueError, match=r"base64|padding|Only"):
        decode_rows("k05V\n")


async def test_bad_input_changes_nothing(client: Client, disaggregated: Cluster, solo: SoloRunner) -> None:
    """vllm-project/vllm#9634, #56844: after every refusal the same processes give the same answer at once."""
    before = await client.json("/cluster")
    bad_prompts: tuple[list[Any], ...] = (
        [300],
        [-1],
        [2**31],
        [2**63],
        [5, 300],
        [1.5],
        ["5"],
        [True],
        [None],
        [[5]],
        [],
    )
    bad_starts = (11, -1, 2**63, 2**70, "3", 1.5, True)
    hostile: list[JsonObject] = [
        *({"token_ids": token_ids} for token_ids in bad_prompts),
        *({"token_ids": prompt_of(10), "routed_experts_prompt_start": start} for start in bad_starts),
    ]
    for index, fields in enumerate(hostile):
        refused = await client.generate(**fields, max_tokens=2, stream=index % 2 == 0)
        assert refused.status == 400, fields
        async with asyncio.timeout(UNTIL_S):
            canary = await client.generate([5, 6, 7], max_tokens=4)
        assert_equals_solo(canary, solo, [5, 6, 7], max_tokens=4)
    largest = await client.generate([299], max_tokens=2, ignore_eos=True)
    assert_equals_solo(largest, solo, [299], max_tokens=2, ignore_eos=True)
    after = await client.json("/cluster")
    assert [w["pid"] for w in before["workers"]] == [w["pid"] for w in after["workers"]]
    assert disaggregated.process.poll() is None
