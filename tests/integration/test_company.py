"""One short request among 31 others of every length: not a bit of its answer depends on them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.cluster import Answer, JsonObject
from tests.e2e.oracle import assert_equals_solo
from tests.integration.kit import checkpoint_kit
from tests.integration.relay import WorkerPlan, running_relay
from tests.integration.test_exact import prompt_of

MakeCheckpoint = Callable[..., Path]

CANARY = [5, 6, 7]
#: Short as in the catalogue; and so long, and of so little urgency, that it loses its blocks to others.
SHORT: JsonObject = {"max_tokens": 4, "ignore_eos": True, "logprobs": 3}
LONG: JsonObject = SHORT | {"max_tokens": 50}
NUM_OTHERS = 31
#: Every pair of values once. Without room for copies, what is taken from a sequence is computed again.
WAYS = [
    ("disaggregated", torch.float32, 2**30),
    ("disaggregated", torch.bfloat16, 0),
    ("aggregated", torch.float32, 0),
    ("aggregated", torch.bfloat16, 2**30),
]


@pytest.mark.parametrize(("mode", "dtype", "swap_space"), WAYS, ids=str)
async def test_alone_and_among_others(
    make_checkpoint: MakeCheckpoint, mode: str, dtype: torch.dtype, swap_space: int
) -> None:
    """vllm-project/vllm#23138, #47069, #51187, jundot/omlx#3476."""
    kit = checkpoint_kit(make_checkpoint(), dtype, block_size=4)
    plan = WorkerPlan(kit, num_blocks=32, swap_space_bytes=swap_space)
    others = [(prompt_of(1 + 2 * index), 20 + 7 * index % 30) for index in range(NUM_OTHERS)]
    async with running_relay(plan, plan if mode == "disaggregated" else None) as relay:
        generate = relay.client.generate
        alone = [await generate(CANARY, **SHORT), await generate(CANARY, **LONG)]
        canaries = [(0, SHORT), (5, LONG), (0, SHORT)]
        requests = [
            *(generate(CANARY, priority=priority, **fields) for priority, fields in canaries),
            *(generate(prompt, max_tokens=n, ignore_eos=True, stream=n % 2 == 0) for prompt, n in others),
        ]
        answers = await asyncio.gather(*requests)
        stats = relay.decode.core.engine.stats
        assert (stats.preemptions_swapped, stats.preemptions_recomputed).count(0) == 1
        await relay.assert_baseline()
    for answer, expected in zip(answers[:3], [alone[0], alone[1], alone[0]], strict=True):
        assert_same(answer, expected)
    assert_equals_solo(alone[0], kit.solo(), CANARY, **SHORT)
    assert_equals_solo(alone[1], kit.solo(), CANARY, **LONG)
    for (prompt, num_tokens), answer in list(zip(others, answers[3:], strict=True))[::5]:
        assert_equals_solo(answer, kit.solo(), prompt, max_tokens=num_tokens, ignore_eos=True)


def assert_same(answer: Answer, expected: Answer) -> None:
    assert (answer.token_ids, answer.logprobs) == (expected.token_ids, expected.logprobs)
    assert np.array_equal(answer.rows, expected.rows)
