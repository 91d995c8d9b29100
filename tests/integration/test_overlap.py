"""What happens at the same time: chunks of a prompt travel while others are computed, and steps are planned ahead."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.handoff.receiver import HandoffReceiver
from common.model.runner import ModelRunner
from tests.e2e.cluster import until
from tests.e2e.oracle import assert_equals_solo
from tests.integration.held_runner import HeldRunner, held
from tests.integration.kit import checkpoint_kit
from tests.integration.relay import WorkerEnd, WorkerPlan, running_relay
from tests.integration.test_exact import prompt_of

MakeCheckpoint = Callable[..., Path]

FIELDS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}


def _held_runner(end: WorkerEnd) -> HeldRunner:
    assert isinstance(end.runner, HeldRunner)
    return end.runner


async def test_chunks_arrive_while_the_next_one_is_computed(make_checkpoint: MakeCheckpoint) -> None:
    """Prefill stands in the middle of its third step; decode has written what the first two brought, and no more."""
    kit, prompt = held(checkpoint_kit(make_checkpoint())), prompt_of(64)
    worker = WorkerPlan(kit, chunk=16)
    async with running_relay(worker, worker) as relay:
        runner = _held_runner(relay.prefiller)
        runner.hold_after(2)
        request = asyncio.create_task(relay.client.generate(prompt, **FIELDS))
        await asyncio.to_thread(runner.wait_held)
        receiver = relay.decode.handoffs
        assert isinstance(receiver, HandoffReceiver)

        async def arrived() -> bool:
            return receiver.rows_received == 32

        await until(arrived)
        layout = relay.decode.core.store.layout
        assert receiver.bytes_received == 32 * (layout.token_bytes + relay.decode.core.store.routing.row_bytes)
        runner.hold_after(None)
        assert_equals_solo(await request, kit.solo(), prompt, **FIELDS)
        await relay.assert_baseline()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_most_steps_are_planned_while_the_one_before_runs(
    make_checkpoint: MakeCheckpoint, dtype: torch.dtype
) -> None:
    kit, prompts = checkpoint_kit(make_checkpoint(), dtype=dtype), [prompt_of(n) for n in (5, 40, 33)]
    async with running_relay(WorkerPlan(kit, chunk=16), None) as relay:
        answers = await asyncio.gather(*(relay.client.generate(prompt, **FIELDS) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_equals_solo(answer, kit.solo(), prompt, **FIELDS)
        assert isinstance(relay.decode.runner, ModelRunner)
        plans, steps = relay.decode.runner.plans, relay.decode.core.engine.stats.steps
        assert plans.num_ready + plans.num_awaited + plans.num_unforeseen == steps
        # At most the first step, one for each request that comes in, and one for each prompt that ends do without.
        assert plans.num_unforeseen <= 1 + 2 * len(prompts)


async def test_a_step_is_planned_while_the_one_before_stands_still(make_checkpoint: MakeCheckpoint) -> None:
    kit, prompt = held(checkpoint_kit(make_checkpoint())), prompt_of(20)
    async with running_relay(WorkerPlan(kit, chunk=32), None) as relay:
        runner = _held_runner(relay.decode)
        runner.hold_after(3)
        request = asyncio.create_task(relay.client.generate(prompt, **FIELDS))
        await asyncio.to_thread(runner.wait_held)

        async def planned() -> bool:
            return runner.plans.is_ready

        await until(planned)
        unforeseen = runner.plans.num_unforeseen
        runner.hold_after(5)
        await asyncio.to_thread(runner.wait_held_after, 5)
        assert runner.plans.num_unforeseen == unforeseen
        runner.hold_after(None)
        assert_equals_solo(await request, kit.solo(), prompt, **FIELDS)
