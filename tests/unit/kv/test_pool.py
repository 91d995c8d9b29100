"""The block pool: counts, sharing, and what its checks find."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv.pool import NULL_BLOCK, BlockId, BlockPool


def test_every_block_but_the_null_block_can_be_had_once() -> None:
    pool = BlockPool(5)
    blocks = pool.try_allocate(4)
    assert blocks is not None
    assert sorted(blocks) == [1, 2, 3, 4]
    assert NULL_BLOCK not in blocks
    assert (pool.num_usable_blocks, pool.num_free, pool.num_used) == (4, 0, 4)
    assert pool.try_allocate(1) is None


def test_a_request_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(5)
    assert pool.try_allocate(5) is None
    assert pool.num_free == 4
    assert pool.try_allocate(0) == []


def test_a_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(3)
    [block] = pool.try_allocate(1) or []
    pool.share([block])
    assert pool.release([block]) == []
    assert pool.num_used == 1
    assert pool.release([block]) == [block]
    assert pool.num_used == 0


def test_the_last_freed_block_is_used_first() -> None:
    pool = BlockPool(6)
    blocks = pool.try_allocate(5) or []
    pool.release([blocks[2]])
    assert pool.try_allocate(1) == [blocks[2]]


def test_misuse_is_a_fault_of_ours() -> None:
    pool = BlockPool(3)
    [block] = pool.try_allocate(1) or []
    pool.release([block])
    with pytest.raises(AssertionError, match="released while free"):
        pool.release([block])
    with pytest.raises(AssertionError, match="shared while free"):
        pool.share([block])


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(1)


def test_a_leak_and_a_stray_holder_are_found() -> None:
    pool = BlockPool(4)
    [block] = pool.try_allocate(1) or []
    assert pool.check_invariants([block]) == []
    assert pool.check_invariants([]) == [f"block {block} has 1 references but 0 holders"]
    assert pool.check_invariants([block, BlockId(3)]) == ["block 3 has 0 references but 1 holders"]


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 6)), max_size=60))
def test_references_always_equal_holders(steps: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(8), list[BlockId]()
    for kind, number in steps:
        if kind == "take":
            held += pool.try_allocate(number) or []
        elif held and kind == "share":
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif held:
            pool.release([held.pop(number % len(held))])
        assert pool.check_invariants(held) == []
        assert pool.num_used == len(set(held))
