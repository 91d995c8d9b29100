"""Real checkpoints: a prompt that the decode worker computes itself gives the bytes of one that was handed over.

Three ways lead to an answer: a handoff, a prompt that decode keeps for itself because little of it is missing from its
cache, and a whole request where no prefill worker fits (here because its weights are others).
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cluster import JsonObject, request_body, until
from tests.e2e.oracle import assert_equals_solo
from tests.integration.held_runner import held
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import Relay, WorkerPlan, running_relay
from tests.integration.test_choices import FREE, assert_all_solo
from tests.integration.test_control import as_answer, assert_whole, done, in_mid_step, raw, runner_of, solo_tokens
from tests.integration.test_exact import both_ways, prompt_of
from tests.integration.test_prefix_cache import cached

MakeCheckpoint = Callable[..., Path]

WAYS = ("handoff", "short prompt", "fallback")
LOCAL_WAYS = WAYS[1:]

FIELDS: JsonObject = {"max_tokens": 12, "ignore_eos": True, "logprobs": 2}


def plans(
    make_checkpoint: MakeCheckpoint, kit: Kit, way: str, local_prefill_max_tokens: int = 1000, **changes: Any
) -> tuple[WorkerPlan, WorkerPlan, JsonObject]:
    """Decode worker, prefill worker, and settings of the router."""
    limit = local_prefill_max_tokens if way == "short prompt" else 0
    decode, prefill = WorkerPlan(kit, local_prefill_max_tokens=limit, **changes), WorkerPlan(kit, **changes)
    if way == "fallback":
        return decode, WorkerPlan(checkpoint_kit(make_checkpoint(seed=8))), {"allow_aggregated_fallback": True}
    return decode, prefill, {}


def running(
    make_checkpoint: MakeCheckpoint, kit: Kit, way: str, admin: JsonObject | None = None, **changes: Any
) -> AbstractAsyncContextManager[Relay]:
    """The cluster of `plans`."""
    decode, prefill, router = plans(make_checkpoint, kit, way, **changes)
    return running_relay(decode, prefill, **router, **(admin or {}))


async def went(relay: Relay) -> dict[str, int]:
    """How many prompts D computed itself, by cause, of which the router knows too; and how many tokens P computed."""
    async with relay.client.session.get(f"{relay.client.url}/metrics") as response:
        text = await response.text()
    counts = {
        cause: int(float(line.rpartition(" ")[2]))
        for cause in ("short_prompt", "whole_request")
        for line in text.splitlines()
        if line.startswith("moerelay_local_prefills_total{") and f'cause="{cause}"' in line
    }
    assert await relay.client.metric("moerelay_aggregated_fallbacks_total") == counts["whole_request"]
    return counts | {"computed by P": relay.prefiller.core.engine.stats.prompt_tokens_computed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_every_way_gives_the_same_bytes(make_checkpoint: MakeCheckpoint, dtype: torch.dtype) -> None:
    """Whole and streamed, several at once, in chunks of 16."""
    kit = checkpoint_kit(make_checkpoint(), dtype)
    prompts, solo = [prompt_of(length) for length in (1, 15, 16, 17, 33, 60, 100)], kit.solo()
    for way in WAYS:
        async with running(make_checkpoint, kit, way, prefix_caching=False) as relay:
            answers = await asyncio.gather(*(both_ways(relay, prompt, **FIELDS) for prompt in prompts))
            counts, computed = await went(relay), relay.decode.core.engine.stats.prompt_tokens_computed
            received = await relay.client.metric("moerelay_handoff_bytes_total", "decode")
            await relay.assert_baseline()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_equals_solo(answer, solo, prompt, **FIELDS)
        num_tokens, locally = 2 * sum(map(len, prompts)), way != "handoff"
        assert (computed, counts["computed by P"]) == ((num_tokens, 0) if locally else (0, num_tokens))
        assert (received == 0) == locally
        assert counts["short_prompt"] == (14 if way == "short prompt" else 0)
        assert counts["whole_request"] == (14 if way == "fallback" else 0)


@pytest.mark.parametrize("limit", [8, 9])
async def test_a_second_turn_of_which_little_is_missing(make_checkpoint: MakeCheckpoint, limit: int) -> None:
    """Prompt 40, output 30, three more: D has 64 of 73 tokens. Nine are missing: too many for 8, not for 9."""
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(40)
    local = limit == 9
    async with running(make_checkpoint, kit, "short prompt", local_prefill_max_tokens=limit) as relay:
        stats = relay.decode.core.engine.stats
        first = await relay.client.generate(prompt, **FIELDS | {"max_tokens": 30})
        assert (await went(relay), stats.prompt_tokens_computed) == (
            {"short_prompt": 0, "whole_request": 0, "computed by P": 40},
            0,
        )
        second_prompt = [*prompt, *first.token_ids, 7, 8, 9]
        second = await relay.client.generate(second_prompt, **FIELDS)
        # P has cached two blocks of the first prompt.
        computed_by_p = 40 if local else 40 + 73 - 32
        assert (await went(relay), stats.prompt_tokens_computed) == (
            {"short_prompt": int(local), "whole_request": 0, "computed by P": computed_by_p},
            9 if local else 0,
        )
        assert cached(second) == (64 if local else 32)
        third = await both_ways(relay, second_prompt, **FIELDS)
        await relay.assert_baseline()
    assert_equals_solo(first, kit.solo(), prompt, **FIELDS | {"max_tokens": 30})
    for answer in (second, third):
        assert_equals_solo(answer, kit.solo(), second_prompt, **FIELDS)


@pytest.mark.parametrize("way", LOCAL_WAYS)
async def test_choices_share_one_local_prefill(make_checkpoint: MakeCheckpoint, way: str) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(37)
    fields = FREE | {"max_tokens": 12, "n": 3}
    async with running(make_checkpoint, kit, way, prefix_caching=False) as relay:
        whole = await relay.client.generate_n(prompt, **fields)
        streamed = await relay.client.generate_n(prompt, stream=True, **fields)
        assert relay.decode.core.engine.stats.prompt_tokens_computed == 2 * 37
        await relay.assert_baseline()
    for answers in (whole, streamed):
        assert_all_solo(answers, kit.solo(), prompt, **fields)


async def test_prompt_logprobs_are_those_of_a_handoff(make_checkpoint: MakeCheckpoint) -> None:
    """Twice: also when every block is cached, all of the prompt is missing for them."""
    kit, body = checkpoint_kit(make_checkpoint()), request_body(prompt_of(33), n=2, **FREE | FIELDS)
    body["sampling_params"]["prompt_logprobs"] = 2
    told = []
    for way in WAYS:
        async with running(make_checkpoint, kit, way) as relay:
            for _ in range(2):
                async with relay.client.session.post(
                    f"{relay.client.url}/inference/v1/generate", json=body
                ) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                told.append((answer["prompt_logprobs"], answer["choices"], answer["usage"]))
            assert relay.decode.core.engine.stats.prompt_tokens_computed == (0 if way == "handoff" else 2 * 33)
            await relay.assert_baseline()
    assert len(told[0][0]) == 33
    assert all(each == told[0] for each in told)


@pytest.mark.parametrize("way", LOCAL_WAYS)
async def test_rows_from_a_start_on_and_none(make_checkpoint: MakeCheckpoint, way: str) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(40)
    async with running(make_checkpoint, kit, way) as relay:
        for start in (0, 5, 16, 39, 40):
            answer = await both_ways(relay, prompt, routed_experts_prompt_start=start, **FIELDS)
            assert_equals_solo(answer, kit.solo(), prompt, start=start, **FIELDS)
            assert len(answer.rows) == 40 + 12 - 1 - start
        bare = await relay.client.generate(prompt, return_routed_experts=False, **FIELDS)
        assert (bare.token_ids, bare.logprobs, bare.row_parts) == (answer.token_ids, answer.logprobs, [])
        await relay.assert_baseline()


@pytest.mark.parametrize("way", LOCAL_WAYS)
async def test_routing_switched_off(make_checkpoint: MakeCheckpoint, way: str) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(40)
    decode, prefill, router = plans(make_checkpoint, kit, way, routing=False)
    async with running(make_checkpoint, kit, way) as relay:
        expected = await relay.client.generate(prompt, **FIELDS)
    async with running_relay(decode, prefill, enable_return_routed_experts=False, **router) as relay:
        for stream in (False, True):
            answer = await relay.client.generate(prompt, stream=stream, **FIELDS)
            assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
            assert answer.row_parts == []
        assert sum((await went(relay)).values()) == 2
        await relay.assert_baseline()
    assert_equals_solo(expected, kit.solo(), prompt, **FIELDS)


@pytest.mark.parametrize("way", LOCAL_WAYS)
@pytest.mark.parametrize("ends", ["abort", "client leaves"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_in_mid_prefill_frees_everything(
    make_checkpoint: MakeCheckpoint, way: str, ends: str, stream: bool
) -> None:
    """One chunk of 16 is computed and the next one stands still: no token, null rows, nothing left."""
    kit = held(checkpoint_kit(make_checkpoint()))
    async with running(make_checkpoint, kit, way) as relay:
        runner = runner_of(relay.decode)
        runner.hold_after(1)
        fields = FIELDS | {"n": 2}
        request = asyncio.create_task(
            relay.client.generate_n(prompt_of(100), stream=stream, request_id="mine", **fields)
        )
        await asyncio.to_thread(runner.wait_held)

        async def gone() -> bool:
            return not relay.decode.service.live_requests()

        if ends == "abort":
            url = f"{relay.client.url}/inference/v1/abort_requests"
            async with relay.client.session.post(url, json={"request_ids": ["mine"]}) as response:
                assert response.status == 200
        else:
            request.cancel()
            await until(gone)
        runner.hold_after(None)
        if ends == "abort":
            for answer in await request:
                assert (answer.error, answer.finish_reason, answer.token_ids) == (None, "abort", [])
        await asyncio.gather(request, return_exceptions=True)
        await relay.assert_baseline()
        assert relay.decode.core.engine.stats.prompt_tokens_computed < 100
        after = await relay.client.generate(prompt_of(100), **FIELDS)
        assert_equals_solo(after, kit.solo(), prompt_of(100), **FIELDS)


@pytest.mark.parametrize("way", LOCAL_WAYS)
async def test_one_choice_is_aborted_in_mid_prefill(make_checkpoint: MakeCheckpoint, way: str) -> None:
    """The other one goes on and keeps all rows of the prompt, although those before went to the first."""
    kit, prompt = held(checkpoint_kit(make_checkpoint())), prompt_of(60)
    async with running(make_checkpoint, kit, way) as relay:
        runner = runner_of(relay.decode)
        runner.hold_after(1)
        fields = FREE | {"n": 2, "max_tokens": 8}
        request = asyncio.create_task(relay.client.generate_n(prompt, **fields))
        await asyncio.to_thread(runner.wait_held)
        [live] = relay.decode.service.live_requests()
        assert await relay.decode.service.abort(live, 0)
        runner.hold_after(None)
        aborted, other = await request
        await relay.assert_baseline()
    assert (aborted.finish_reason, aborted.token_ids, aborted.row_parts) == ("abort", [], [])
    assert_equals_solo(other, kit.solo(), prompt, choice=1, **fields)


@pytest.mark.parametrize("num_blocks", [8, 30])
async def test_both_ways_at_once_in_small_pools(make_checkpoint: MakeCheckpoint, num_blocks: int) -> None:
    """Some prompts are short, some have a beginning that D knows, the others are handed over."""
    kit, stem = checkpoint_kit(make_checkpoint()), prompt_of(40)
    fields = FREE | {"n": 2, "max_tokens": 6}
    shared: JsonObject = {"num_blocks": num_blocks, "chunk": 5}
    prompts = [[*stem[: 8 * (i % 6)], *prompt_of(4 + i % 20, seed=i % 4)] for i in range(36)]
    random.Random(5).shuffle(prompts)
    async with running(make_checkpoint, kit, "short prompt", local_prefill_max_tokens=20, **shared) as relay:
        answers = await asyncio.gather(
            *(relay.client.generate_n(prompt, stream=i % 2 == 0, **fields) for i, prompt in enumerate(prompts))
        )
        counts = await went(relay)
        await relay.assert_baseline()
    assert 0 < counts["short_prompt"] < len(prompts)
    assert counts["computed by P"] > 0
    for prompt, choices in zip(prompts, answers, strict=True):
        assert_all_solo(choices, kit.solo(), prompt, **fields)


@pytest.mark.parametrize("way", LOCAL_WAYS)
async def test_new_weights_come_after_the_prompt(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], way: str
) -> None:
    """A prompt under way is finished with the old ones; a prefill worker that has the same ones now is used again."""
    old, new = held(checkpoint_kit(make_checkpoint())), checkpoint_kit(make_checkpoint(seed=8))
    prompt, fields = prompt_of(100), {"max_tokens": 10, "ignore_eos": True}
    async with running(make_checkpoint, old, way, admin) as relay:
        runner = runner_of(relay.decode)
        runner.hold_after(2)
        request = asyncio.create_task(raw(relay, prompt, **fields))
        await asyncio.to_thread(runner.wait_held)
        update = asyncio.create_task(done(relay, "/update_weights", {"path": str(new.path), "version": "b"}))
        await in_mid_step(relay, relay.decode, update)
        choice = await request
        assert_whole(choice, prompt, {"0", "b"})
        spans = choice["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "b"]
        assert choice["token_ids"][: spans[0]["end"]] == solo_tokens(old.solo(), prompt, spans[0]["end"])
        later = await raw(relay, prompt, **fields)
        assert_equals_solo(as_answer(later), new.solo(), prompt, **fields)
        assert await went(relay) == {
            "short_prompt": 2 if way == "short prompt" else 0,
            "whole_request": 1 if way == "fallback" else 0,
            "computed by P": 100 if way == "fallback" else 0,
        }
        await relay.assert_baseline()
