"""The KV store: slot arithmetic, round trips, blank and ruined blocks, missing rows."""

import numpy as np
import pytest
import torch

from common.errors import RoutingMissingError
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore, slots_of
from common.routing.record import RoutingArray, RoutingLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.bfloat16)
ROUTING = RoutingLayout(num_layers=3, top_k=2, num_experts=300)
BLOCKS = [BlockId(5), BlockId(2), BlockId(7)]


def store(*, poison: bool = False) -> KVStore:
    return KVStore(LAYOUT, ROUTING, 8, torch.device("cpu"), poison=poison)


def rows(num_rows: int) -> RoutingArray:
    return (np.arange(num_rows * 6, dtype=np.uint16) % 300).reshape(num_rows, 3, 2)


def test_slots_follow_the_block_table() -> None:
    assert slots_of(BLOCKS, 0, 12, 4).tolist() == [20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31]
    assert slots_of(BLOCKS, 3, 6, 4).tolist() == [23, 8, 9]
    assert slots_of(BLOCKS, 6, 6, 4).tolist() == []
    assert slots_of([], 0, 0, 4).tolist() == []


def test_token_bytes_count_k_and_v_of_all_layers() -> None:
    assert LAYOUT.token_bytes == 3 * 2 * 2 * 4 * 2


def test_kv_comes_back_in_the_order_of_the_slots() -> None:
    here, slots = store(), slots_of(BLOCKS, 2, 9, 4)
    kv_LCNGD = torch.arange(3 * 2 * 7 * 2 * 4, dtype=torch.float32).reshape(3, 2, 7, 2, 4).bfloat16()
    here.write_kv(slots, kv_LCNGD)
    assert torch.equal(here.read_kv(slots), kv_LCNGD)
    assert torch.equal(here.read_kv(slots[::-1].copy()), kv_LCNGD.flip(2))
    assert here.read_kv(slots).is_contiguous()
    assert here.kv_LCSGD.float().abs().sum() == kv_LCNGD.float().abs().sum()


def test_rows_come_back_as_a_copy_in_the_models_dtype() -> None:
    here, slots = store(), slots_of(BLOCKS, 2, 9, 4)
    here.write_rows(slots, rows(7))
    got = here.read_rows(slots)
    np.testing.assert_array_equal(got, rows(7), strict=True)
    assert got.flags.c_contiguous
    got[:] = 0
    np.testing.assert_array_equal(here.read_rows(slots), rows(7))


def test_reading_a_row_that_nobody_wrote_names_it() -> None:
    here = store()
    here.write_rows(slots_of(BLOCKS, 0, 3, 4), rows(3))
    with pytest.raises(RoutingMissingError, match="offset 2 of 4"):
        here.read_rows(slots_of(BLOCKS, 1, 5, 4))
    assert len(here.read_rows(slots_of(BLOCKS, 3, 3, 4))) == 0


def test_cleared_blocks_are_blank() -> None:
    here, slots = store(poison=True), slots_of(BLOCKS, 0, 12, 4)
    assert here.read_kv(slots).isnan().all()
    here.clear_blocks(BLOCKS)
    assert not here.read_kv(slots).any()
    with pytest.raises(RoutingMissingError):
        here.read_rows(slots[:1])


@pytest.mark.parametrize("poison", [False, True])
def test_freed_blocks_forget_their_rows(poison: bool) -> None:
    here, slots = store(poison=poison), slots_of(BLOCKS, 0, 12, 4)
    here.clear_blocks(BLOCKS)
    here.write_rows(slots, rows(12))
    here.free_blocks(BLOCKS[:1])
    with pytest.raises(RoutingMissingError):
        here.read_rows(slots[:4])
    np.testing.assert_array_equal(here.read_rows(slots[4:]), rows(12)[4:])
    assert bool(here.read_kv(slots[:4]).isnan().all()) is poison


def test_a_block_has_rows_when_every_slot_has() -> None:
    here = store()
    here.write_rows(slots_of(BLOCKS, 0, 7, 4), rows(7))
    assert [here.has_rows(block) for block in BLOCKS] == [True, False, False]
    here.write_rows(slots_of(BLOCKS, 7, 8, 4), rows(1))
    assert [here.has_rows(block) for block in BLOCKS] == [True, True, False]


def test_poison_spares_the_null_block() -> None:
    here = store(poison=True)
    here.free_blocks(BLOCKS)
    assert not here.kv_LCSGD[:, :, :4].any()


def test_nothing_to_clear_or_to_free_is_fine() -> None:
    here = store(poison=True)
    here.clear_blocks([])
    here.free_blocks([])


@pytest.mark.parametrize("poison", [False, True])
def test_released_memory_comes_back_blank(poison: bool) -> None:
    kept = store(poison=poison)
    slots = slots_of(BLOCKS, 0, 12, 4)
    kept.write_kv(slots, torch.ones(3, 2, 12, 2, 4, dtype=torch.bfloat16))
    shape = kept.kv_LCSGD.shape
    kept.release()
    assert kept.kv_LCSGD.untyped_storage().nbytes() == 0
    kept.restore()
    assert (kept.kv_LCSGD.shape, kept.kv_LCSGD.dtype) == (shape, torch.bfloat16)
    content = kept.read_kv(slots)
    assert bool(content.isnan().all() if poison else (content == 0).all())
