"""The trace and the simulated fleet behind `benchmarks.placement`."""

from collections.abc import Sequence

import pytest

from benchmarks.conversations import Conversation, Shape, conversations
from benchmarks.simulated_fleet import BLOCK_SIZE, BlockCache, SimulatedFleet, Speeds, imbalance
from common.setting_types import PlacementName
from router.placement.policies import POLICIES

SHAPE = Shape(num_conversations=60, per_s=6.0)


@pytest.fixture(scope="module")
def trace() -> Sequence[Conversation]:
    return list(conversations(SHAPE, seed=1))


def test_turns_grow_out_of_each_other(trace: Sequence[Conversation]) -> None:
    for conversation in trace:
        for turn in range(1, len(conversation.turns)):
            before = conversation.until_after(turn - 1)
            assert conversation.prompt(turn)[: len(before)] == before
    systems = {tuple(conversation.prompt(0)[: SHAPE.system_tokens]) for conversation in trace}
    assert 1 < len(systems) <= SHAPE.num_system_prompts


def test_caches_keep_beginnings_longest() -> None:
    cache = BlockCache(3 * BLOCK_SIZE)
    cache.keep([1, 2, 3])
    cache.keep([7])
    assert (cache.hit([1, 2, 3]), cache.hit([7])) == (2, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_request(name: PlacementName, trace: Sequence[Conversation]) -> None:
    fleet = SimulatedFleet(name, num_prefill=2, num_decode=3, num_routers=2, speeds=Speeds())
    outcome = fleet.run(trace)
    turns = [turn for conversation in trace for turn in conversation.turns]
    assert len(outcome.ttfts_s) == len(turns)
    assert outcome.num_prompt_tokens == sum(turn.prompt_len for turn in turns)
    assert sum(outcome.decode_work) == sum(turn.num_output_tokens for turn in turns)
    assert sum(outcome.prefill_work) == outcome.num_prompt_tokens - outcome.prefill_hits


def test_imbalance() -> None:
    assert (imbalance([5, 5]), imbalance([9, 0, 0]), imbalance([0, 0])) == (1, 3, 1)
