"""Several choices of one prompt, with and without a handoff: one prefill, and each choice is its own solo run."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from common.model.batch import Chunk
from common.sampling import SamplingParams
from tests.e2e.cluster import Answer, JsonObject, request_body, sse_events
from tests.e2e.oracle import assert_equals_solo
from tests.fakes.fake_runner import FakeRunner
from tests.integration.kit import checkpoint_kit, fake_kit
from tests.integration.relay import Relay, WorkerPlan, running_relay
from tests.integration.test_exact import MODES, plan, prompt_of

MakeCheckpoint = Callable[..., Path]

FREE: JsonObject = {"temperature": 1.5, "seed": 11, "ignore_eos": True, "logprobs": 2}


def assert_all_solo(answers: list[Answer], solo: SoloRunner, prompt: list[int], **fields: Any) -> None:
    for choice, answer in enumerate(answers):
        assert_equals_solo(answer, solo, prompt, choice=choice, **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 16, 37])
async def test_choices_are_solo_runs_of_one_prefill(make_checkpoint: MakeCheckpoint, mode: str, length: int) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(length)
    fields = FREE | {"max_tokens": 12, "n": 3}
    async with running_relay(*plan(kit, mode, prefix_caching=False)) as relay:
        whole = await relay.client.generate_n(prompt, **fields)
        streamed = await relay.client.generate_n(prompt, stream=True, **fields)
        await relay.assert_baseline()
        computes = relay.prefill or relay.decode
        assert computes.core.engine.stats.prompt_tokens_computed == 2 * length
        if relay.prefill is not None:
            assert relay.decode.core.engine.stats.prompt_tokens_computed == 0
    for answers in (whole, streamed):
        assert len(answers) == 3
        assert_all_solo(answers, kit.solo(), prompt, **fields)
    assert len({tuple(answer.token_ids) for answer in whole}) == 3
    assert whole[0].usage is not None
    assert whole[0].usage["completion_tokens"] == 3 * 12


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [3, 4, 5])
async def test_more_choices_than_blocks(make_checkpoint: MakeCheckpoint, mode: str, num_blocks: int) -> None:
    """Five choices of 20 + 16 tokens: one needs three blocks of 16, two of them five, because they share the first."""
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(20)
    fields = FREE | {"max_tokens": 16, "n": 5}
    worker = WorkerPlan(kit, num_blocks=num_blocks)
    async with running_relay(worker, worker if mode == "disaggregated" else None) as relay:
        first, second = await asyncio.gather(
            relay.client.generate_n(prompt, **fields), relay.client.generate_n(prompt_of(20, 1), **fields | {"n": 2})
        )
        await relay.assert_baseline()
    assert_all_solo(first, kit.solo(), prompt, **fields)
    assert_all_solo(second, kit.solo(), prompt_of(20, 1), **fields | {"n": 2})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_token_ends_some_choices(make_checkpoint: MakeCheckpoint, mode: str, stream: bool) -> None:
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(21)
    params = SamplingParams(8, temperature=1.5, seed=11, n=4, ignore_eos=True)
    first = [kit.solo().run(prompt, params, choice=choice).tokens[0].token_id for choice in range(4)]
    fields = FREE | {"max_tokens": 8, "n": 4, "stop_token_ids": [first[0], first[2]]}
    async with running_relay(*plan(kit, mode)) as relay:
        answers = await relay.client.generate_n(prompt, stream=stream, **fields)
        await relay.assert_baseline()
    assert_all_solo(answers, kit.solo(), prompt, **fields)
    for choice in (0, 2):
        assert (answers[choice].token_ids, answers[choice].stop_reason) == ([first[choice]], first[choice])
        assert len(answers[choice].rows) == 21


@pytest.mark.parametrize("num_top", [0, 3])
async def test_prompt_logprobs_are_the_same_with_a_handoff(make_checkpoint: MakeCheckpoint, num_top: int) -> None:
    """vllm-project/vllm#50792, #27449, vllm-ascend#13363. A small credit cuts them into many chunks."""
    kit, prompt = checkpoint_kit(make_checkpoint()), prompt_of(37)
    body = request_body(prompt, max_tokens=3, n=2, seed=5, temperature=1.0, ignore_eos=True)
    body["sampling_params"]["prompt_logprobs"] = num_top
    told = []
    for mode in MODES:
        decode, prefill = WorkerPlan(kit, credit_bytes=2_000, chunk=10), WorkerPlan(kit, chunk=10)
        async with running_relay(decode, prefill if mode == "disaggregated" else None) as relay:
            async with relay.client.session.post(f"{relay.client.url}/inference/v1/generate", json=body) as response:
                payload = await response.json()
                assert response.status == 200, payload
            told.append(payload["prompt_logprobs"])
            await relay.assert_baseline()
    handed_over, aggregated = told
    assert handed_over == aggregated
    assert (len(handed_over), handed_over[0]) == (37, None)
    expected = kit.solo().run(prompt, SamplingParams(1, prompt_logprobs=num_top)).prompt_logprobs
    assert expected is not None
    for position in range(1, 37):
        own = expected[position, 0]
        entry = handed_over[position][str(prompt[position])]
        assert (np.float32(entry["logprob"]), entry["rank"]) == (own["logprob"], own["rank"])


def hold_at(relay: Relay, position: int) -> threading.Event:
    """The decode worker's device stands still before it forwards that position, until the event is set."""
    go_on = threading.Event()

    def wait(chunks: Sequence[Chunk]) -> bool:
        if any(chunk.start >= position for chunk in chunks):
            assert go_on.wait(timeout=30)
        return False

    assert isinstance(relay.decode.runner, FakeRunner)
    relay.decode.runner.fails_on = wait
    return go_on


@pytest.mark.parametrize("mode", MODES)
async def test_one_choice_is_aborted_and_the_others_go_on(mode: str) -> None:
    kit, prompt = fake_kit(), [5, 6, 7, 8, 9]
    fields: JsonObject = {"temperature": 1.5, "seed": 3, "ignore_eos": True, "max_tokens": 20, "n": 3}
    answers = [Answer(200) for _ in range(3)]
    async with running_relay(*plan(kit, mode)) as relay:
        go_on = hold_at(relay, 7)
        body = request_body(prompt, stream=True, **fields)
        async with relay.client.session.post(f"{relay.client.url}/inference/v1/generate", json=body) as response:
            async for event in sse_events(response):
                if event != "[DONE]":
                    for choice in json.loads(event)["choices"]:
                        answers[choice["index"]].take(choice)
                if answers[1].token_ids and not go_on.is_set():
                    [name] = relay.decode.service.live_requests()
                    assert await relay.decode.service.abort(name, 1)
                    go_on.set()
        await relay.assert_baseline()
    assert answers[1].finish_reason == "abort"
    # The step that stood still was its fourth token's at most.
    assert 1 <= len(answers[1].token_ids) <= 4
    assert len(answers[1].rows) == 5 + len(answers[1].token_ids) - 1
    for choice in (0, 2):
        assert_equals_solo(answers[choice], kit.solo(), prompt, choice=choice, **fields)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seats", [1, 8])
async def test_a_client_that_leaves_while_choices_wait_leaves_nothing_behind(mode: str, seats: int) -> None:
    kit = fake_kit()
    worker = WorkerPlan(kit, max_num_seqs=seats)
    fields: JsonObject = {"temperature": 1.5, "seed": 1, "ignore_eos": True, "max_tokens": 60, "n": 6}
    async with running_relay(worker, worker if mode == "disaggregated" else None) as relay:
        for position in (6, 8):
            go_on = hold_at(relay, position)
            body = request_body([5, 6, 7, 8, 9], stream=True, **fields)
            async with relay.client.session.post(f"{relay.client.url}/inference/v1/generate", json=body) as response:
                assert await response.content.readany()
                assert relay.decode.blocks_used > 0
            go_on.set()
            await relay.assert_baseline()
        answers = await relay.client.generate_n([5, 6, 7], **fields)
    assert_all_solo(answers, kit.solo(), [5, 6, 7], **fields)
