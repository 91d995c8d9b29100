"""A plan that was made before its ids were known is the plan, and one for something else is never taken for it."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.kv.pool import BlockId
from common.model.batch import Chunk
from common.model.kernels.native_ops import NativeAttentionPlan
from common.model.kernels.reference import TorchAttentionPlan
from common.model.plan import ForwardPlan, plan_forward
from common.model.plan_ahead import PlanAhead
from tests.unit.model.harness import Harness, load_decoder, make_checkpoint


def _chunk(ids: Sequence[int], start: int, blocks: tuple[int, ...], *, logits: bool = True, rows: bool = True) -> Chunk:
    return Chunk(ids, start, tuple(BlockId(b) for b in blocks), wants_logits=logits, wants_rows=rows)


#: A decode, a prompt's chunk, and another decode of a longer sequence, which is computed first.
BATCH = [_chunk([7], 5, (1,)), _chunk([1, 2, 3], 4, (2,), logits=False), _chunk([9], 20, (3, 4), rows=False)]
_NOTHING = torch.empty(0, dtype=torch.int64)
_NO_SLOTS = np.empty(0, np.int64)
UNKNOWN = [replace(chunk, token_ids=[0] * len(chunk.token_ids)) for chunk in BATCH]


@pytest.fixture(scope="module", params=["torch", "auto"])
def harness(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Harness:
    path = make_checkpoint(tmp_path_factory.mktemp("m") / "m", "qwen3_moe", {})
    return Harness(load_decoder(path, kernels=request.param))


@pytest.fixture
def plans(harness: Harness) -> PlanAhead:
    return PlanAhead(
        lambda chunks: plan_forward(chunks, harness.decoder.config, harness.store, harness.decoder.kernels)
    )


def _prepared(plans: PlanAhead, chunks: Sequence[Chunk]) -> None:
    """As one step does it: it prepares the next one, and is then computed itself."""
    plans.prepare(chunks)
    plans.take([_chunk([1], 0, (5,))])
    plans.prepare(())


def _assert_same(one: ForwardPlan, other: ForwardPlan) -> None:
    assert one.token_ids_T.tolist() == other.token_ids_T.tolist()
    assert torch.equal(one.positions_T, other.positions_T)
    assert torch.equal(one.slots_T, other.slots_T)
    assert torch.equal(one.logits_N, other.logits_N)
    assert one.first_rows == other.first_rows
    assert one.routed_slots.tolist() == other.routed_slots.tolist()
    if isinstance(one.attention, NativeAttentionPlan):
        assert isinstance(other.attention, NativeAttentionPlan)
        assert one.attention.block_table.tolist() == other.attention.block_table.tolist()
        assert one.attention.sequences.tolist() == other.attention.sequences.tolist()
        return
    assert isinstance(one.attention, TorchAttentionPlan)
    assert isinstance(other.attention, TorchAttentionPlan)
    for window, groups in other.attention.groups.items():
        for mine, theirs in zip(one.attention.groups[window], groups, strict=True):
            assert mine.tokens == theirs.tokens
            for tile, same in zip(mine.tiles, theirs.tiles, strict=True):
                assert torch.equal(tile.cache_rows, same.cache_rows)
                assert tile.hidden is same.hidden is None or torch.equal(tile.hidden, same.hidden)  # type: ignore[arg-type]


def test_a_prepared_plan_gets_the_ids_and_equals_one_that_was_made_on_the_spot(
    harness: Harness, plans: PlanAhead
) -> None:
    _prepared(plans, UNKNOWN)
    plan = plans.take(BATCH)
    assert (plans.num_ready + plans.num_awaited, plans.num_unforeseen) == (1, 1)
    assert plan.token_ids_T.tolist() == [9, 7, 1, 2, 3]
    _assert_same(plan, plan_forward(BATCH, harness.decoder.config, harness.store, harness.decoder.kernels))


def test_a_block_more_changes_nothing(harness: Harness, plans: PlanAhead) -> None:
    _prepared(plans, UNKNOWN)
    grown = [_chunk([7], 5, (1, 6)), *BATCH[1:]]
    _assert_same(plans.take(grown), plan_forward(grown, harness.decoder.config, harness.store, harness.decoder.kernels))
    assert plans.num_unforeseen == 1


@pytest.mark.parametrize(
    "unlike",
    [
        UNKNOWN[:2],
        [UNKNOWN[1], UNKNOWN[0], UNKNOWN[2]],
        [_chunk([0], 6, (1,)), *UNKNOWN[1:]],
        [_chunk([0, 0], 5, (1,)), *UNKNOWN[1:]],
        [_chunk([0], 5, (6,)), *UNKNOWN[1:]],
        [_chunk([0], 5, (1,), logits=False), *UNKNOWN[1:]],
        [_chunk([0], 5, (1,), rows=False), *UNKNOWN[1:]],
    ],
)
def test_a_plan_for_anything_else_is_not_used(harness: Harness, plans: PlanAhead, unlike: list[Chunk]) -> None:
    _prepared(plans, unlike)
    _assert_same(plans.take(BATCH), plan_forward(BATCH, harness.decoder.config, harness.store, harness.decoder.kernels))
    assert plans.num_ready + plans.num_awaited == 0


def test_a_plan_is_used_for_the_step_after_the_next_call_only(plans: PlanAhead) -> None:
    _prepared(plans, UNKNOWN)
    plans.take([_chunk([1], 0, (5,))])
    plans.prepare(())
    plans.take(BATCH)
    assert plans.num_ready + plans.num_awaited == 0


def test_it_counts_whether_the_plan_was_there_in_time() -> None:
    started, may_end = threading.Event(), threading.Event()

    def make(chunks: Sequence[Chunk]) -> ForwardPlan:
        started.set()
        assert may_end.wait(timeout=30)
        nothing = TorchAttentionPlan({})
        return ForwardPlan(
            _NOTHING, _NOTHING, _NOTHING, nothing, _NOTHING, [], _NO_SLOTS, _NO_SLOTS, range(len(chunks))
        )

    plans = PlanAhead(make)
    plans.prepare(BATCH)
    assert started.wait(timeout=30)
    assert not plans.is_ready
    plans.prepare(())
    threading.Timer(0.05, may_end.set).start()
    plans.take(BATCH)
    assert (plans.num_ready, plans.num_awaited, plans.num_unforeseen) == (0, 1, 0)


def test_what_is_prepared_is_forgotten_with_the_weights(harness: Harness, plans: PlanAhead) -> None:
    plans.prepare(UNKNOWN)
    plans.forget()
    assert not plans.is_ready
    plans.prepare(())
    plans.take(BATCH)
    assert plans.num_unforeseen == 1


def test_a_plan_needs_no_memory_of_the_cache(harness: Harness) -> None:
    """It may be made while that is given back."""
    harness.store.release()
    try:
        plan = plan_forward(BATCH, harness.decoder.config, harness.store, harness.decoder.kernels)
    finally:
        harness.store.restore()
    _assert_same(plan, plan_forward(BATCH, harness.decoder.config, harness.store, harness.decoder.kernels))
