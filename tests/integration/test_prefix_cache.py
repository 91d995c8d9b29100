"""Real checkpoints: the second time a prompt comes, less is computed and shipped, and the answer is the same bytes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cluster import Answer, JsonObject, request_body
from tests.e2e.oracle import assert_equals_solo
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import Relay, WorkerPlan, running_relay
from tests.integration.test_control import done
from tests.integration.test_exact import MODES, both_ways, plan, prompt_of

MakeCheckpoint = Callable[..., Path]

FIELDS: JsonObject = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}
#: fp32: 2 layers × (K and V) × 2 heads × 16 numbers × 4 bytes; rows: 2 layers × 2 ids × 1 byte.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4 + 2 * 2


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    number: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return number


def computing(relay: Relay) -> int:
    """Prompt tokens forwarded so far, on any worker."""
    ends = [relay.decode] if relay.prefill is None else [relay.decode, relay.prefill]
    return sum(end.core.engine.stats.prompt_tokens_computed for end in ends)


async def ask(relay: Relay, kit: Kit, prompt: list[int], **fields: Any) -> Answer:
    """A whole answer, equal to the solo run."""
    answer = await relay.client.generate(prompt, **FIELDS | fields)
    assert_equals_solo(answer, kit.solo(), prompt, **FIELDS)
    return answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_cached_tokens_are_those_that_nobody_computed(
    make_checkpoint: MakeCheckpoint, mode: str, chunk: int, dtype: torch.dtype
) -> None:
    """vllm-project/vllm-ascend#8910, vllm#26624, ModelTC/LightLLM#1423: 0, then 32 of 48; never a number of D's own."""
    kit, prompt = checkpoint_kit(make_checkpoint(), dtype), prompt_of(48)
    async with running_relay(*plan(kit, mode, chunk)) as relay:
        for length, expected in ((48, 0), (48, 32), (49, 48), (47, 32), (15, 0)):
            before = computing(relay)
            tokens = [*prompt, 9][:length]
            answer = await ask(relay, kit, tokens)
            assert answer.usage is not None
            assert answer.usage["prompt_tokens"] == length
            assert cached(answer) == length - (computing(relay) - before) == expected
            await relay.assert_baseline()
        streamed = await relay.client.generate(prompt, stream=True, **FIELDS)
        assert_equals_solo(streamed, kit.solo(), prompt, **FIELDS)


async def test_every_source_of_a_prompt_in_one_answer(make_checkpoint: MakeCheckpoint) -> None:
    """vllm-project/vllm#55584, #56402, #57966: blocks 0-1 cached on D, 0-2 on P, then evicted from either."""
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(60)
    wide, narrow = WorkerPlan(kit, num_blocks=40), WorkerPlan(kit, num_blocks=7)
    for decode, prefill in ((wide, wide), (narrow, wide), (wide, narrow), (narrow, narrow)):
        async with running_relay(decode, prefill) as relay:
            stats = [end.core.engine.stats for end in (relay.decode, relay.prefiller)]
            await ask(relay, kit, prompt[:32])
            for suffix in range(4):
                await ask(relay, kit, [*prompt[:32], *prompt_of(12 + suffix, seed=suffix)])
                await ask(relay, kit, prompt_of(70, seed=suffix))  # takes most of a narrow worker
            before = stats[0].prefix_cache_hits
            received = await relay.client.metric("moerelay_handoff_bytes_total", "decode")
            await ask(relay, kit, prompt)
            await ask(relay, kit, prompt)
            received = await relay.client.metric("moerelay_handoff_bytes_total", "decode") - received
            # What D has is not shipped, whatever P had to compute.
            assert received == (120 - (stats[0].prefix_cache_hits - before)) * TOKEN_BYTES
            await relay.assert_baseline()
            assert stats[0].prefix_cache_hits >= 48
            assert stats[1].prefix_cache_hits >= 48


@pytest.mark.parametrize("mode", MODES)
async def test_salts_and_requests_without_rows_keep_apart(make_checkpoint: MakeCheckpoint, mode: str) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(40)
    async with running_relay(*plan(kit, mode)) as relay:
        bare = await relay.client.generate(prompt, return_routed_experts=False, **FIELDS)
        assert (cached(bare), bare.row_parts) == (0, [])
        assert [cached(await ask(relay, kit, prompt)) for _ in range(2)] == [0, 32]
        assert [cached(await ask(relay, kit, prompt, cache_salt="a")) for _ in range(2)] == [0, 32]
        assert cached(await ask(relay, kit, prompt, cache_salt="b")) == 0
        again = await relay.client.generate(prompt, return_routed_experts=False, **FIELDS)
        assert (cached(again), again.token_ids, again.logprobs) == (32, bare.token_ids, bare.logprobs)
        await relay.assert_baseline()


@pytest.mark.parametrize("mode", MODES)
async def test_a_conversation_finds_its_last_turn(make_checkpoint: MakeCheckpoint, mode: str) -> None:
    """Prompt 20 and output 30: 49 forwarded positions, three full blocks, on the worker that decoded them."""
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(20)
    async with running_relay(*plan(kit, mode)) as relay:
        first = await relay.client.generate(prompt, max_tokens=30, ignore_eos=True)
        hits = relay.decode.core.engine.stats.prefix_cache_hits
        second = await ask(relay, kit, [*prompt, *first.token_ids, 7, 8, 9])
        assert relay.decode.core.engine.stats.prefix_cache_hits - hits == 48
        assert cached(second) == (48 if mode == "aggregated" else 16)


@pytest.mark.parametrize("mode", MODES)
async def test_prompt_logprobs_twice(make_checkpoint: MakeCheckpoint, mode: str) -> None:
    """vllm-project/vllm#8268, #3251, #42245: equal arrays of 33 entries, also when every block is cached."""
    kit, body = checkpoint_kit(make_checkpoint()), request_body(prompt_of(33), **FIELDS)
    body["sampling_params"]["prompt_logprobs"] = 1
    async with running_relay(*plan(kit, mode)) as relay:
        told = []
        for _ in range(2):
            async with relay.client.session.post(f"{relay.client.url}/inference/v1/generate", json=body) as response:
                told.append(await response.json())
        assert cached(await ask(relay, kit, prompt_of(33))) == 32
    assert [len(answer["prompt_logprobs"]) for answer in told] == [33, 33]
    assert told[0]["prompt_logprobs"] == told[1]["prompt_logprobs"]
    assert told[0]["choices"] == told[1]["choices"]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in told] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
async def test_new_weights_find_nothing_of_the_old_ones(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str
) -> None:
    old, new = checkpoint_kit(make_checkpoint()), checkpoint_kit(make_checkpoint(seed=8))
    prompt = prompt_of(40)
    async with running_relay(*plan(old, mode), **admin) as relay:
        assert [cached(await ask(relay, old, prompt)) for _ in range(2)] == [0, 32]
        await done(relay, "/update_weights", {"path": str(new.path), "version": "b"})
        assert [cached(await ask(relay, new, prompt)) for _ in range(2)] == [0, 32]
        answer = await done(relay, "/reset_prefix_cache")
        # 45 forwarded positions fill two blocks, on each worker that has them.
        assert answer["num_blocks"] == (2 if mode == "aggregated" else 4)
        views = (await relay.client.json("/cluster"))["workers"]
        assert cached(await ask(relay, new, prompt)) == 0
        await relay.assert_baseline()
    assert {view["kv_blocks_total"] for view in views} == {160}


@pytest.mark.parametrize("mode", MODES)
async def test_answers_after_sleep_compute_their_prompt_again(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str
) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(40)
    async with running_relay(*plan(kit, mode), **admin) as relay:
        await ask(relay, kit, prompt)
        await done(relay, "/sleep?level=1")
        await done(relay, "/wake_up")
        await done(relay, "/resume")
        assert [cached(await ask(relay, kit, prompt)) for _ in range(2)] == [0, 32]
        await relay.assert_baseline()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [8, 30])
async def test_shared_beginnings_at_once_in_small_pools(
    make_checkpoint: MakeCheckpoint, mode: str, num_blocks: int
) -> None:
    kit, stem = checkpoint_kit(make_checkpoint()), prompt_of(40)
    worker = WorkerPlan(kit, num_blocks=num_blocks, chunk=5)
    fields = FIELDS | {"n": 2, "temperature": 1.3, "seed": 5}
    prompts = [[*stem[: 8 * (i % 6)], *prompt_of(20, seed=i % 4)] for i in range(24)]
    async with running_relay(worker, worker if mode == "disaggregated" else None) as relay:
        answers = await asyncio.gather(*(relay.client.generate_n(prompt, **fields) for prompt in prompts))
        await relay.assert_baseline()
        assert relay.decode.core.engine.stats.prefix_cache_hits > 0
    for prompt, choices in zip(prompts, answers, strict=True):
        for choice, answer in enumerate(choices):
            assert_equals_solo(answer, kit.solo(), prompt, choice=choice, **fields)


async def test_off_means_off(make_checkpoint: MakeCheckpoint) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(48)
    async with running_relay(*plan(kit, "disaggregated", prefix_caching=False)) as relay:
        assert [cached(await ask(relay, kit, prompt)) for _ in range(2)] == [0, 0]
        await both_ways(relay, prompt, **FIELDS)
        assert await relay.client.metric("moerelay_prefix_cache_queries_tokens_total", "prefill") == 0
        assert await relay.client.metric("moerelay_kv_blocks_cached", "decode") == 0
