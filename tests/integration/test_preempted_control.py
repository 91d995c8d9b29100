"""Pause, weight updates and sleep while sequences have lost their blocks: nothing hangs, and no answer is a mixture."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.engine.solo import SoloRunner
from common.sampling import SamplingParams
from tests.e2e.cluster import JsonObject
from tests.e2e.oracle import assert_equals_solo
from tests.integration.held_runner import held
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import Relay, WorkerPlan, running_relay
from tests.integration.test_control import as_answer, assert_whole, call, done, hold, in_mid_step, raw
from tests.integration.test_exact import prompt_of

MakeCheckpoint = Callable[..., Path]

#: Room for copies of what is taken from sequences, or none, so that all of it is computed again.
SWAP = {"swapped": 2**30, "recomputed": 0}
PROMPTS = [prompt_of(30, seed) for seed in range(5)]
FIELDS: JsonObject = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1}
PAUSES = ("keep", "abort", "wait")

in_each_way = pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("disaggregated", "swapped"),
        ("aggregated", "recomputed"),
        pytest.param("disaggregated", "recomputed", marks=pytest.mark.slow),
        pytest.param("aggregated", "swapped", marks=pytest.mark.slow),
    ],
)

Requests = list["asyncio.Task[JsonObject]"]


@asynccontextmanager
async def short_of_blocks(
    kit: Kit, mode: str, kind: str, admin: dict[str, Any]
) -> AsyncIterator[tuple[Relay, Requests]]:
    """5 requests of 5 blocks each in a pool of 8; somebody is preempted, and the decode worker in mid-step."""
    plan = WorkerPlan(held(kit), num_blocks=8, swap_space_bytes=SWAP[kind])
    async with running_relay(plan, plan if mode == "disaggregated" else None, **admin) as relay:
        requests = [asyncio.create_task(raw(relay, prompt, **FIELDS)) for prompt in PROMPTS]
        await hold(relay.decode, 1)
        while not relay.decode.core.engine.load().preempted:
            await hold(relay.decode, 1)
        yield relay, requests
        await relay.assert_baseline()
        assert getattr(relay.decode.core.engine.stats, f"preemptions_{kind}") > 0


async def operate(relay: Relay, path: str, body: JsonObject | None = None) -> JsonObject:
    """The answer to a control request that comes in the middle of the step."""
    operation = asyncio.create_task(done(relay, path, body))
    await in_mid_step(relay, relay.decode, operation)
    return operation.result()


def assert_solo(choice: JsonObject, solo: SoloRunner, prompt: list[int]) -> None:
    """The whole answer."""
    assert_equals_solo(as_answer(choice), solo, prompt, **FIELDS)


def assert_begins_like(choice: JsonObject, solo: SoloRunner, prompt: list[int], num_tokens: int) -> None:
    """So many tokens, their logprobs, and their rows."""
    if not num_tokens:
        return
    answer = as_answer(choice)
    expected = solo.run(prompt, SamplingParams(num_tokens, temperature=0.0, ignore_eos=True, logprobs=1), 0)
    assert answer.token_ids[:num_tokens] == [token.token_id for token in expected.tokens]
    told = [token.logprob.logprob for token in expected.tokens if token.logprob is not None]
    assert [np.float32(each["logprob"]) for each in answer.logprobs[:num_tokens]] == [np.float32(each) for each in told]
    assert expected.rows_TLK is not None
    assert np.array_equal(answer.rows[: len(expected.rows_TLK)], expected.rows_TLK)


def assert_ended(choices: list[JsonObject], solo: SoloRunner, pause: str) -> None:
    """By an abort somewhere, or with everything that was asked for; in any case as the solo run begins."""
    reasons = {"abort": {"abort", "length"}, "keep": {"length"}, "wait": {"length"}}[pause]
    for choice, prompt in zip(choices, PROMPTS, strict=True):
        assert choice["finish_reason"] in reasons
        assert_whole(choice, prompt, {"0"})
        assert_begins_like(choice, solo, prompt, len(choice["token_ids"]))
        assert choice["finish_reason"] == "abort" or len(choice["token_ids"]) == 40
    aborted = [choice for choice in choices if choice["finish_reason"] == "abort"]
    assert any(choice["token_ids"] for choice in aborted) == (pause == "abort")


@in_each_way
@pytest.mark.parametrize("pause", PAUSES)
async def test_a_pause(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str, kind: str, pause: str
) -> None:
    """sgl-project/sglang#11673, vllm-project/vllm#22197: what preempted requests have is in their answers."""
    kit = checkpoint_kit(make_checkpoint())
    async with short_of_blocks(kit, mode, kind, admin) as (relay, requests):
        await operate(relay, f"/pause?mode={pause}")
        assert await relay.decode.violations() == []
        # Those with a copy stay as they are. The others are computed again first, since their weights may go, in blocks
        # of sequences that keep a copy then.
        assert (relay.decode.core.engine.load().preempted > 0) == (pause == "keep")
        assert any(request.done() for request in requests) <= (pause != "keep")
        await done(relay, "/resume")
        choices = await asyncio.gather(*requests)
    assert_ended(choices, kit.solo(), pause)


@in_each_way
@pytest.mark.parametrize("pause", PAUSES)
async def test_new_weights(
    make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str, kind: str, pause: str
) -> None:
    """An answer of one version is that version's solo run; one of two begins like the first."""
    old, new = checkpoint_kit(make_checkpoint()), checkpoint_kit(make_checkpoint(seed=8))
    solos = {"0": old.solo(), "1": new.solo()}
    async with short_of_blocks(old, mode, kind, admin) as (relay, requests):
        await operate(relay, "/update_weights", {"path": str(new.path), "mode": pause})
        choices = await asyncio.gather(*requests)
        later = await raw(relay, PROMPTS[0], **FIELDS)
    assert later["weight_versions"] == [{"version": "1", "start": 0, "end": 40}]
    assert_solo(later, solos["1"], PROMPTS[0])
    if pause != "keep":
        assert_ended(choices, solos["0"], pause)
        return
    for choice, prompt in zip(choices, PROMPTS, strict=True):
        assert_whole(choice, prompt, {"0", "1"})
        first = choice["weight_versions"][0]
        assert_begins_like(choice, solos[first["version"]], prompt, first["end"])
        if first["end"] == 40:
            assert_solo(choice, solos[first["version"]], prompt)
    assert any(len(choice["weight_versions"]) == 2 for choice in choices)


@in_each_way
@pytest.mark.parametrize("pause", PAUSES)
async def test_sleep(make_checkpoint: MakeCheckpoint, admin: dict[str, Any], mode: str, kind: str, pause: str) -> None:
    """Frozen requests keep a worker awake; the others end first, and their copies are gone with them."""
    kit = checkpoint_kit(make_checkpoint())
    async with short_of_blocks(kit, mode, kind, admin) as (relay, requests):
        await operate(relay, f"/pause?mode={pause}")
        status, answer = await call(relay, f"/sleep?level=1&mode={pause}")
        assert (status, "are live" in str(answer)) == ((409, True) if pause == "keep" else (200, False))
        if pause != "keep":
            assert relay.decode.core.engine.load().swap_bytes_used == 0
            await done(relay, "/wake_up")
        await done(relay, "/resume")
        choices = await asyncio.gather(*requests)
        later = await raw(relay, PROMPTS[0], **FIELDS)
    assert_ended(choices, kit.solo(), pause)
    assert_solo(later, kit.solo(), PROMPTS[0])
