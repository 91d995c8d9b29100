"""Real checkpoints through a whole cluster: with and without a handoff the bytes are those of the solo run."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.cluster import Answer, JsonObject, request_body, sse_events, until
from tests.e2e.oracle import assert_equals_solo
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import Relay, WorkerPlan, running_relay
from tests.parity.reference import differing_rows, run_reference

MakeCheckpoint = Callable[..., Path]

MODES = ("disaggregated", "aggregated")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(4, 300) for _ in range(length)]


def plan(kit: Kit, mode: str, chunk: int = 16, *, prefix_caching: bool = True) -> tuple[WorkerPlan, WorkerPlan | None]:
    """Decode and prefill worker of one mode."""
    worker = WorkerPlan(kit, chunk=chunk, prefix_caching=prefix_caching)
    return worker, worker if mode == "disaggregated" else None


async def both_ways(relay: Relay, prompt: list[int], **fields: Any) -> Answer:
    """The whole answer, after comparing it with the streamed one."""
    whole = await relay.client.generate(prompt, **fields)
    streamed = await relay.client.generate(prompt, stream=True, **fields)
    assert (streamed.token_ids, streamed.logprobs) == (whole.token_ids, whole.logprobs)
    assert streamed.rows.dtype == whole.rows.dtype
    assert np.array_equal(streamed.rows, whole.rows)
    return whole


def assert_looks_like_routing(rows_TLK: np.ndarray[tuple[int, ...], np.dtype[np.integer]], num_experts: int) -> None:
    """K distinct ids per row and layer (which all zeros are not), several experts per layer, not one row for all."""
    ordered = np.sort(rows_TLK, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert rows_TLK.max() < num_experts
    for layer in range(rows_TLK.shape[1]):
        assert len(np.unique(rows_TLK[:, layer])) >= 3
    assert len({row.tobytes() for row in rows_TLK}) > 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_batches_in_every_mode_and_dtype(make_checkpoint: MakeCheckpoint, mode: str, dtype: torch.dtype) -> None:
    """vllm-project/vllm#54730, sgl-project/sglang#12162: six at once, 24 generated tokens each.

    The execution modes that exist: with and without a handoff, each in both dtypes. There are no graphs and no compiled
    path that could skip the capture, so a padded batch does not exist either.
    """
    kit = checkpoint_kit(make_checkpoint(), dtype)
    solo, fields = kit.solo(), {"max_tokens": 24, "ignore_eos": True, "logprobs": 1}
    prompts = [prompt_of(length) for length in (1, 16, 17, 30, 33, 60)]
    async with running_relay(*plan(kit, mode)) as relay:
        answers = await asyncio.gather(*(both_ways(relay, prompt, **fields) for prompt in prompts))
        await relay.assert_baseline()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_equals_solo(answer, solo, prompt, **fields)
        assert_looks_like_routing(answer.rows, 8)
        assert len({row.tobytes() for row in answer.rows[len(prompt) :]}) > 1


async def test_handoff_gives_the_rows_of_an_aggregated_run(make_checkpoint: MakeCheckpoint) -> None:
    """llm-d/llm-d-router#1473, #1627, vllm-project/vllm#39289: 44 rows, the prompt's included, in both modes.

    Another request of 60 tokens fills D's memory before. transformers on the same checkpoint is the judge of the
    experts, by sets, and of the first logprob, which P computed (NVIDIA/TensorRT-LLM#11727, sgl-project/sglang#40298).
    """
    path = make_checkpoint()
    kit, prompt = checkpoint_kit(path), prompt_of(37)
    fields: JsonObject = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    answers = []
    for mode in MODES:
        async with running_relay(*plan(kit, mode)) as relay:
            await relay.client.generate(prompt_of(60, seed=1), max_tokens=8)
            answers.append(await both_ways(relay, prompt, **fields))
    handed_over, aggregated = answers
    assert handed_over.rows.shape == (44, 2, 2)
    assert handed_over.rows.tobytes() == aggregated.rows.tobytes()
    assert handed_over.token_ids == aggregated.token_ids
    assert handed_over.logprobs == aggregated.logprobs
    reference = run_reference(path, prompt + handed_over.token_ids[:-1])
    assert differing_rows(handed_over.rows, reference) == []
    logprobs_TV = torch.log_softmax(reference.logits_TV, dim=-1)
    for index, entry in enumerate(handed_over.logprobs):
        assert entry["token_id"] == handed_over.token_ids[index]
        assert entry["logprob"] == pytest.approx(float(logprobs_TV[36 + index, entry["token_id"]]), abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype"),
    [(256, 8, "uint8"), (257, 2, "uint16"), (512, 2, "uint16")],
)
async def test_dtype_is_the_models(
    make_checkpoint: MakeCheckpoint, mode: str, num_experts: int, top_k: int, dtype: str
) -> None:
    """PrimeIntellect-ai/prime-rl#2487, verifiers#2043: by the number of experts, in every array of every stream."""
    kit = checkpoint_kit(make_checkpoint(num_experts=num_experts, num_experts_per_tok=top_k))
    fields: JsonObject = {"max_tokens": 27, "ignore_eos": True}
    rows = []
    async with running_relay(*plan(kit, mode)) as relay:
        for seed in range(2):
            prompt = prompt_of(100, seed)
            answer = await both_ways(relay, prompt, **fields)
            streamed = await relay.client.generate(prompt, stream=True, stream_options={"max_event_bytes": 1024})
            parts = [*answer.row_parts, *streamed.row_parts]
            assert len(parts) > 3
            assert {part.dtype.name for part in parts} == {dtype}
            assert_equals_solo(answer, kit.solo(), prompt, **fields)
            rows.append(answer.rows)
    if num_experts == 256:
        assert np.concatenate(rows).max() == 255  # the largest id that a byte holds does occur


async def test_small_ids_of_a_large_model_keep_its_dtype(make_checkpoint: MakeCheckpoint) -> None:
    """SkyRL#2078: a reply whose ids all fit a byte is uint16 nevertheless."""
    kit = checkpoint_kit(make_checkpoint(num_experts=257))
    async with running_relay(*plan(kit, "disaggregated")) as relay:
        answers = [await relay.client.generate([token], max_tokens=1) for token in range(4, 24)]
    small = [answer for answer in answers if answer.rows.max() < 256]
    assert small
    assert {answer.rows.dtype.name for answer in small} == {"uint16"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [5, 16, 128])
async def test_rows_do_not_depend_on_how_prompts_are_cut(
    make_checkpoint: MakeCheckpoint, mode: str, chunk: int
) -> None:
    """sgl-project/sglang#26860: the longest prompts, four at once, in one chunk and in many; no buffer is too small."""
    kit = checkpoint_kit(make_checkpoint())
    solo = kit.solo()
    cases = [(prompt_of(length), max_tokens) for length, max_tokens in ((100, 5), (127, 1), (120, 8), (126, 2))]
    async with running_relay(*plan(kit, mode, chunk)) as relay:
        answers = await asyncio.gather(
            *(both_ways(relay, prompt, max_tokens=n, ignore_eos=True) for prompt, n in cases)
        )
    for (prompt, max_tokens), answer in zip(cases, answers, strict=True):
        assert_equals_solo(answer, solo, prompt, max_tokens=max_tokens, ignore_eos=True)


async def test_decode_never_recomputes_a_prompt(make_checkpoint: MakeCheckpoint) -> None:
    """llm-d/llm-d-router#2855: D forwards no prompt token, and KV and rows of all of them arrive."""
    kit = checkpoint_kit(make_checkpoint())
    async with running_relay(*plan(kit, "disaggregated", prefix_caching=False)) as relay:
        for length in (1, 16, 33, 100):
            before = await relay.client.metric("moerelay_handoff_bytes_total", "decode")
            for stream in (False, True):
                await relay.client.generate(prompt_of(length), max_tokens=3, stream=stream)
            received = await relay.client.metric("moerelay_handoff_bytes_total", "decode") - before
            # fp32: 2 layers × (K and V) × 2 heads × 16 numbers × 4 bytes; rows: 2 layers × 2 ids × 1 byte.
            assert received == 2 * length * (2 * 2 * 2 * 16 * 4 + 2 * 2)
        assert relay.decode.core.engine.stats.prompt_tokens_computed == 0
        assert relay.prefiller.core.engine.stats.prompt_tokens_computed == 2 * (1 + 16 + 33 + 100)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_token_that_ends_the_request_frees_both_sides(
    make_checkpoint: MakeCheckpoint, mode: str, stream: bool
) -> None:
    """sgl-project/sglang#12151: EOS or a stop id sampled by P: one token, p rows, no decode step, blocks free.

    Stop strings are not supported here: they are a 400.
    """
    kit = checkpoint_kit(make_checkpoint())
    ends: list[JsonObject] = [
        {"logit_bias": {"2": 100}},
        {"logit_bias": {"77": 100}, "stop_token_ids": [77]},
    ]
    async with running_relay(*plan(kit, mode)) as relay:
        for fields in ends:
            answer = await relay.client.generate(prompt_of(21), max_tokens=20, stream=stream, **fields)
            assert (len(answer.token_ids), answer.finish_reason, len(answer.rows)) == (1, "stop", 21)
            await relay.assert_baseline()
        assert relay.decode.core.engine.stats.decode_steps == 0
        refused = await relay.client.generate(prompt_of(21), max_tokens=20, stream=stream, stop=["x"])
        assert refused.status == 400


async def aborted(relay: Relay, request_id: str) -> bool:
    """False while the router does not know the id yet."""
    url = f"{relay.client.url}/inference/v1/abort_requests"
    async with relay.client.session.post(url, json={"request_ids": [request_id]}) as response:
        return response.status == 200


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_aborted_while_it_waits_has_null_rows(make_checkpoint: MakeCheckpoint, mode: str) -> None:
    """vime#49: finish reason "abort", no tokens, rows null and the key present, streamed and not."""
    kit = checkpoint_kit(make_checkpoint())
    worker = WorkerPlan(kit, num_blocks=8)
    async with running_relay(worker, worker if mode == "disaggregated" else None) as relay:
        relay.valve.allow(0)  # whoever has the blocks keeps them
        fields: JsonObject = {"max_tokens": 60, "ignore_eos": True}
        ahead = [asyncio.create_task(relay.client.generate(prompt_of(60, i), **fields)) for i in range(6)]

        async def five_wait() -> bool:
            return relay.decode.core.engine.load().waiting == 5

        await until(five_wait)
        waiting = [
            asyncio.create_task(relay.client.generate(prompt_of(60), stream=stream, request_id=name, **fields))
            for name, stream in (("whole", False), ("stream", True))
        ]
        for name in ("whole", "stream"):
            await until(partial(aborted, relay, name))
        for answer in await asyncio.gather(*waiting):
            assert (answer.finish_reason, answer.token_ids, answer.row_parts) == ("abort", [], [])
        relay.valve.open()
        for answer in await asyncio.gather(*ahead):
            assert len(answer.token_ids) == 60
        await relay.assert_baseline()


async def test_chunks_that_coalesce_keep_tokens_and_rows_together(make_checkpoint: MakeCheckpoint) -> None:
    """vllm-project/vllm#37094: behind a starving reader, events carry several tokens and all their rows."""
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(20)
    fields: JsonObject = {"max_tokens": 60, "ignore_eos": True}
    answer = Answer(200)
    async with running_relay(*plan(kit, "disaggregated")) as relay:
        body = request_body(prompt, stream=True, **fields)
        async with relay.client.session.post(f"{relay.client.url}/inference/v1/generate", json=body) as response:
            async for event in sse_events(response):
                time.sleep(0.02)  # noqa: ASYNC251  # the fault itself: nothing on this event loop may run meanwhile
                if event != "[DONE]":
                    answer.take(json.loads(event)["choices"][0])
    sizes = np.diff([0, *(tokens for tokens, _ in answer.spans)])
    assert sizes.max() > 1
    assert all(rows == 20 + tokens - 1 for tokens, rows in answer.spans if tokens)
    assert_equals_solo(answer, kit.solo(), prompt, **fields)
