"""What becomes of the KV and the rows of sequences that lose their blocks, and of the memory that they take."""

from dataclasses import replace

import pytest

from common.engine.moves import BlockMover
from common.engine.preemption import BlockChanges, Preemption
from common.engine.preemption_log import PreemptionLog
from common.engine.request import RequestId
from common.engine.sequence import SequenceState
from common.engine.stats import EngineStats
from common.engine.swap import SwapSpace
from common.kv.chain import Scope, TokenChain
from common.kv.pool import BlockId, BlockPool
from common.kv.store import slots_of
from common.sampling import SamplingParams
from tests.fakes.fake_runner import ROUTING
from tests.unit.engine.crowded import (
    NOTHING,
    PLENTY,
    POSITION_BYTES,
    ROW_BYTES,
    TOKEN_BYTES,
    assert_solo,
    prompt_of,
    rig_of,
    run_until_preempted,
    two_that_do_not_fit,
    watched_rig,
)
from tests.unit.engine.rig import (
    greedy,
    make_request,
)


@pytest.mark.parametrize(
    ("swap", "kinds"), [(NOTHING, {False}), (40 * POSITION_BYTES, {True, False}), (PLENTY, {True})]
)
def test_saved_memory_is_bounded(swap: int, kinds: set[bool]) -> None:
    rig = rig_of(12, swap=swap)
    got = [rig.submit(make_request(f"r{i}", prompt_of(6, i), greedy(22))) for i in range(8)]
    highest = 0
    while rig.step():
        highest = max(highest, rig.core.load().swap_bytes_used)
    assert highest <= swap
    stats = rig.core.stats
    assert {True: stats.preemptions_swapped > 0, False: stats.preemptions_recomputed > 0} == {
        kind: kind in kinds for kind in (True, False)
    }
    assert stats.preemptions == stats.preemptions_swapped + stats.preemptions_recomputed
    assert (stats.swapped_tokens > 0, stats.recomputed_tokens > 0) == (True in kinds, False in kinds)
    assert_solo(*got)
    rig.assert_baseline()


def test_saved_bytes_are_those_of_kv_and_of_rows_that_are_wanted() -> None:
    for start, size in ((0, POSITION_BYTES), (None, TOKEN_BYTES)):
        rig = rig_of(7)
        two_that_do_not_fit(rig, routing_start=start)
        assert rig.core.load().swap_bytes_used == rig.core.stats.swapped_tokens * size > 0
        assert (rig.core.load().preempted, rig.core.load().waiting) == (1, 1)
        rig.run()
        rig.assert_baseline()


def test_choices_that_give_their_prompt_up_together_share_its_copy() -> None:
    rig, store = watched_rig(5, seats=1)
    rig.submit(make_request("a", prompt_of(8), SamplingParams(3, n=4, temperature=1.5, ignore_eos=True)))
    rig.step()
    rig.submit(replace(make_request("urgent", prompt_of(16, 1), greedy(3)), priority=-1))
    rig.core.abort(RequestId("a"), 0)
    store.reads.clear()
    rig.step()
    assert (rig.core.stats.preemptions_swapped, rig.core.stats.swapped_tokens) == (3, 8)
    assert [len(slots) for slots in store.reads] == [8]
    rig.run()
    rig.assert_baseline()


def test_nobody_gets_the_copy_of_another_request_that_had_the_same_blocks() -> None:
    """Both lost them in one round; the ends and the requests tell the copies apart."""
    _, store = watched_rig(4)
    pool, stats = BlockPool(store.num_blocks), EngineStats()
    mover = BlockMover(store, pool, stats, PreemptionLog(stats, SwapSpace(PLENTY, TOKEN_BYTES, ROW_BYTES)))
    store.clear_blocks([BlockId(1)])
    store.write_rows(slots_of([BlockId(1)], 0, 4, 4), ROUTING.empty(4))
    losses, changes = [], BlockChanges()
    for name, start, end in (("a", 0, 3), ("a", 0, 3), ("b", None, 3), ("c", 0, 4)):
        request = make_request(name, prompt_of(5), greedy(2), start=start)
        losses.append(SequenceState(request, 1, TokenChain(Scope(""), 4), 0))
        pending = Preemption(losses[-1], (BlockId(1),), end, end, exceeds=False)
        changes.preempted.append(pending)
    assert mover.carry_out(changes) == []
    assert losses[0].saved[0] is losses[1].saved[0]
    assert [s.saved[0].end for s in losses] == [3, 3, 3, 4]
    assert [s.saved[0].rows_NLK is None for s in losses] == [False, False, True, False]
    assert stats.swapped_tokens == 3 + 3 + 4


def test_blocks_that_were_taken_are_ruined_and_what_comes_back_is_whole() -> None:
    """The store poisons what is free: one byte read from a block that is gone would make the logits NaN."""
    rig = rig_of(7, prefix_caching=False)
    a, b = two_that_do_not_fit(rig)
    blocks = rig.runner.batches[-2][1].blocks
    held = rig.runner.batches[-1][0].blocks
    lost = [block for block in blocks if block not in held]
    assert len(lost) >= 2
    assert rig.store.read_kv(slots_of(lost, 0, 4 * len(lost), 4)).isnan().all()
    rig.run()
    assert_solo(a, b)


def test_the_cached_beginning_is_shared_and_not_recomputed() -> None:
    rig = rig_of(6, swap=NOTHING)
    a, b = two_that_do_not_fit(rig, num_prompt=5)
    assert len(b.request.prompt) + len(b.tokens) == 12  # of which two blocks are full and cached
    rig.cancel(RequestId("a"))
    rig.run()
    assert_solo(b)
    assert rig.core.stats.recomputed_tokens == 12 - 8
    assert not a.ended


@pytest.mark.parametrize("num_cached", [0, 2])
def test_a_copy_is_written_only_where_the_cache_has_nothing(num_cached: int) -> None:
    """11 positions in 3 blocks: those that the cache still has are others' too, and only read."""
    rig, store = watched_rig(6)
    _, b = two_that_do_not_fit(rig, num_prompt=5)
    assert len(b.request.prompt) + len(b.tokens) == 12
    if not num_cached:
        rig.core.reset_prefix_cache()
    rig.cancel(RequestId("a"))
    store.clears.clear()
    rig.step()
    own, *_ = store.clears
    assert len(own) == 3 - num_cached
    slots = [4 * block + i for block in own for i in range(4)]
    assert store.writes == [slots[:-1]]
    rig.run()
    assert_solo(b)
    assert rig.core.stats.recomputed_tokens == 0


@pytest.mark.parametrize("exact", [True, False])
def test_where_results_depend_on_the_batch_all_kv_is_kept_and_comes_back(exact: bool) -> None:
    """Two equal requests: the one that stays has cached everything that the other had, from a pass of its own."""
    rig, store = watched_rig(7, swap=NOTHING, exact=exact)
    a, b = (rig.submit(make_request(name, prompt_of(6), greedy(14))) for name in "ab")
    run_until_preempted(rig)
    assert (rig.core.load().swap_bytes_used, rig.core.stats.preemptions_recomputed) == (
        (0, 1) if exact else (12 * POSITION_BYTES, 0)
    )
    rig.run()
    assert [len(slots) for slots in store.writes] == ([] if exact else [12])
    assert_solo(a, b)
    rig.assert_baseline()


def test_rows_that_come_back_are_those_of_their_positions() -> None:
    """Half of the blocks are shared, the others written; a later prompt reads the rows of both."""
    rig = rig_of(6)
    a, b = two_that_do_not_fit(rig, num_prompt=5)
    rig.cancel(a.request.request_id)
    rig.run()
    before = rig.core.stats.prefix_cache_hits
    later = rig.submit(make_request("later", [*b.request.prompt, *(t.token_id for t in b.tokens)], greedy(1)))
    rig.run()
    assert rig.core.stats.prefix_cache_hits - before == 16
    assert_solo(b, later)


def test_a_block_to_grow_into_is_blank() -> None:
    """Attention masks what is not written yet by weight zero, and zero times NaN is NaN."""
    rig = rig_of(8, prefix_caching=False)
    rig.submit(make_request("a", prompt_of(4), greedy(9)))
    rig.step()
    rig.step()
    blocks = rig.runner.batches[-1][0].blocks
    assert len(blocks) == 2
    assert rig.store.read_kv(slots_of(blocks, 4, 5, 4)).all()
    assert not rig.store.read_kv(slots_of(blocks, 5, 8, 4)).any()
