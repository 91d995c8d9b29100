"""The KV store: slot arithmetic, round trips, blank and ruined blocks, missing rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from common.errors import RoutingMissingError
from common.kv.copies import MIN_READ_RUN, Copies, NativeCopies, Run, TorchCopies, copies_of, runs_of
from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore, slots_of
from common.model import native
from common.routing.record import RoutingArray, RoutingLayout

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype=torch.bfloat16)
ROUTING = RoutingLayout(num_layers=3, top_k=2, num_experts=300)
BLOCKS = [BlockId(5), BlockId(2), BlockId(7)]
COPIES: dict[str, Callable[[torch.Tensor], Copies]] = {
    "torch": TorchCopies,
    **{name: partial(NativeCopies, native.load(name)) for name in native.available()},
}


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


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("num_heads", [2, 5, 64])
@pytest.mark.parametrize("order", ["ascending", "descending", "shuffled", "one block"])
def test_kv_moves_alike_however_the_slots_lie(order: str, num_heads: int, copies: str) -> None:
    """Slots of 16 bytes, of 40 (no slot begins where the one before it did in its cache line), and of many lines."""
    num_blocks = 2 * MIN_READ_RUN
    layout = replace(LAYOUT, num_kv_heads=num_heads)
    here = KVStore(layout, ROUTING, num_blocks + 1, torch.device("cpu"), copies=COPIES[copies])
    numbers = np.arange(1, num_blocks + 1)
    if order == "shuffled":
        np.random.default_rng(1).shuffle(numbers)
    numbers = {"descending": numbers[::-1], "one block": numbers[:1]}.get(order, numbers)
    slots = slots_of([BlockId(int(n)) for n in numbers], 1, 4 * len(numbers) - 1, 4)
    bits = np.random.default_rng(2).integers(0, 2**16, (3, 2, len(slots), num_heads, 4), np.uint16)
    here.write_kv(slots, torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
    expected = np.zeros((3, 2, 4 * num_blocks + 4, num_heads, 4), np.uint16)
    expected[:, :, slots] = bits
    np.testing.assert_array_equal(here.kv_LCSGD.view(torch.int16).numpy().view(np.uint16), expected)
    out = np.empty(bits.shape, bits.dtype)
    here.read_kv_bytes(slots, out)
    for got in (out, here.read_kv(slots).view(torch.int16).numpy().view(np.uint16)):
        np.testing.assert_array_equal(got, bits)
    # From memory that is not contiguous, as that of a copy of which only the end is wanted.
    here.write_kv(slots[5:], torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)[:, :, :-5])
    expected[:, :, slots[5:]] = bits[:, :, :-5]
    np.testing.assert_array_equal(here.kv_LCSGD.view(torch.int16).numpy().view(np.uint16), expected)


def test_native_copies_are_chosen_where_they_run() -> None:
    cache = torch.zeros(1, 2, 4, 1, 1)
    assert isinstance(copies_of(cache), NativeCopies if native.available() else TorchCopies)
    assert isinstance(copies_of(cache.to("meta")), TorchCopies)


@pytest.mark.parametrize("copies", sorted(COPIES.keys() - {"torch"}))
def test_native_copies_refuse_memory_of_another_size(copies: str) -> None:
    here = KVStore(LAYOUT, ROUTING, 8, torch.device("cpu"), copies=COPIES[copies])
    slots, memory = slots_of(BLOCKS, 2, 9, 4), np.zeros(7 * LAYOUT.token_bytes + 1, np.uint8)
    for wrong in (memory, memory[:-2], memory[:0]):
        with pytest.raises(ValueError, match="size"):
            here.read_kv_bytes(slots, wrong)
        with pytest.raises(ValueError, match="size"):
            here.write_kv_bytes(slots, wrong)
    with pytest.raises((BufferError, ValueError), match=r"writ|read-only"):
        here.read_kv_bytes(slots, memoryview(bytes(7 * LAYOUT.token_bytes)))
    here.write_kv_bytes(slots, memory[:-1])
    assert not here.kv_LCSGD.any()


def test_runs_are_the_longest_stretches_of_neighbours() -> None:
    assert list(runs_of(np.array([4, 5, 6, 9, 8, 9]))) == [Run(4, 0, 3), Run(9, 3, 4), Run(8, 4, 6)]
    assert list(runs_of(np.array([], np.int64))) == []


@pytest.mark.parametrize(("start", "end"), [(2, 9), (4, 8), (7, 8), (8, 9), (5, 5)])
def test_rows_of_positions_are_those_of_their_slots(start: int, end: int) -> None:
    here = store()
    here.write_rows(slots_of(BLOCKS, 2, 9, 4), rows(7))
    got = here.read_row_range(BLOCKS, start, end)
    np.testing.assert_array_equal(got, rows(7)[start - 2 : end - 2], strict=True)
    got[:] = 0
    np.testing.assert_array_equal(here.read_row_range(BLOCKS, start, end), rows(7)[start - 2 : end - 2])


def test_a_missing_row_among_positions_is_named() -> None:
    here = store()
    here.write_rows(slots_of(BLOCKS, 0, 3, 4), rows(3))
    for start, end, name in ((3, 4, "offset 0 of 1"), (1, 5, "offset 2 of 4")):
        with pytest.raises(RoutingMissingError, match=name):
            here.read_row_range(BLOCKS, start, end)


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
