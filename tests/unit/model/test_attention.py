"""Tiled attention over the paged cache against plain softmax attention in NumPy."""

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.kv.pool import BlockId
from common.kv.store import KVLayout, KVStore, slots_of
from common.model.attention import TILE, plan_groups
from common.model.batch import Chunk
from common.routing.record import RoutingLayout

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK = 4, 2, 8, 16
_CPU = torch.device("cpu")

Doubles = npt.NDArray[np.float64]


class _Sequence:
    """Queries, keys and values of one sequence, its K and V written into a store block by block."""

    def __init__(self, store: KVStore, length: int, first_block: int) -> None:
        random = np.random.default_rng(length)
        self.q, k, v = (
            torch.from_numpy(random.standard_normal((length, heads, _HEAD_DIM), np.float32))
            for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
        )
        self.k, self.v = k, v
        count = -(-length // _BLOCK)
        self.blocks = [BlockId(first_block + i) for i in reversed(range(count))]
        store.clear_blocks(self.blocks)
        store.write_kv(slots_of(self.blocks, 0, length, _BLOCK), torch.stack((k, v))[None])

    def chunk(self, start: int, end: int) -> Chunk:
        return Chunk([0] * (end - start), start, self.blocks, wants_logits=False, wants_rows=False)

    def expected(self, position: int, window: int | None, sinks: Doubles | None = None) -> Doubles:
        """Attention of one position, [N, D], by the textbook; a sink adds to the sum and has no value."""
        first = 0 if window is None else max(0, position - window + 1)
        output = np.empty((_HEADS, _HEAD_DIM))
        for head in range(_HEADS):
            k, v = (t[first : position + 1, head // (_HEADS // _KV_HEADS)].double().numpy() for t in (self.k, self.v))
            weights = np.exp(k @ self.q[position, head].double().numpy())
            output[head] = weights @ v / (weights.sum() + (0 if sinks is None else np.exp(sinks[head])))
        return output


@pytest.fixture
def store() -> KVStore:
    layout = KVLayout(1, _KV_HEADS, _HEAD_DIM, _BLOCK, torch.float32)
    return KVStore(layout, RoutingLayout(1, 1, 1), 128, _CPU, poison=True)


#: Logits that differ from head to head: beside the keys', far below them, and far above.
_SINKS = [None, [0.3, -1.2, 2.5, 0.9], [-40.0, -1e4, 0.0, -7.0], [60.0, 12.0, -3.0, 25.0]]


@pytest.mark.parametrize("sinks", _SINKS)
@pytest.mark.parametrize("window", [None, 1, 40, TILE])
def test_decode_steps_and_chunks_match_plain_attention(
    store: KVStore, window: int | None, sinks: list[float] | None
) -> None:
    long, short, chunked = _Sequence(store, 2 * TILE + 5, 1), _Sequence(store, 3, 50), _Sequence(store, TILE + 9, 60)
    chunks = [long.chunk(2 * TILE + 4, 2 * TILE + 5), short.chunk(2, 3), chunked.chunk(TILE - 20, TILE + 9)]
    groups = plan_groups(chunks, _HEADS, window, store.layout, store.kv_LCSGD.shape[2], _CPU)
    assert [(group.tokens, group.num_sequences) for group in groups] == [(slice(0, 2), 2), (slice(2, 31), 1)]

    q = torch.cat((long.q[-1:], short.q[-1:], chunked.q[TILE - 20 :]))
    cache = store.kv_LCSGD[0].view(-1, _HEAD_DIM)
    sinks_N = None if sinks is None else torch.tensor(sinks)
    output = torch.cat([group.attend(q[group.tokens], cache, _KV_HEADS, sinks_N=sinks_N) for group in groups])

    positions = [(long, 2 * TILE + 4), (short, 2), *((chunked, p) for p in range(TILE - 20, TILE + 9))]
    doubles = None if sinks is None else np.array(sinks)
    expected = np.stack([sequence.expected(position, window, doubles) for sequence, position in positions])
    np.testing.assert_allclose(output.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_tiles_before_the_window_are_not_read(store: KVStore) -> None:
    sequence = _Sequence(store, 2 * TILE + 5, 1)
    planned = {}
    for window in (None, 4, 5, 6):
        chunks = [sequence.chunk(2 * TILE + 4, 2 * TILE + 5)]
        (group,) = plan_groups(chunks, _HEADS, window, store.layout, store.kv_LCSGD.shape[2], _CPU)
        planned[window] = len(group.tiles)
    assert planned == {None: 3, 4: 1, 5: 1, 6: 2}


@pytest.mark.parametrize(
    ("window", "with_mask"),
    [
        # Queries 1536 to 1791 are in tile 6, and see no key of a later one.
        (None, [6]),
        # A window of 257 goes back to key 1280, the first of tile 5, for the first query, and not as far for others.
        (257, [5, 6]),
        # One that reaches from the last query to the first key of tile 2 cuts no tile after that.
        (1280, [1, 6]),
    ],
)
def test_only_tiles_that_hide_a_key_have_a_mask_and_it_has_one_row_per_token(
    store: KVStore, window: int | None, with_mask: list[int]
) -> None:
    chunk = _Sequence(store, 7 * TILE, 1).chunk(6 * TILE, 7 * TILE)
    (group,) = plan_groups([chunk], _HEADS, window, store.layout, store.kv_LCSGD.shape[2], _CPU)
    masks = {index: tile.hidden for index, tile in enumerate(reversed(group.tiles)) if tile.hidden is not None}
    assert sorted(6 - index for index in masks) == with_mask
    assert {tuple(mask.shape) for mask in masks.values()} == {(1, 1, TILE, 1, TILE)}
    causal = np.triu(np.ones((TILE, TILE), bool), 1)
    assert np.array_equal(masks[0].numpy()[0, 0, :, 0], causal)


def test_planning_many_heads_over_a_long_context_takes_little_memory() -> None:
    """128 query heads of one KV head, 256 tokens behind 32k: a mask for every head alone would be 8 MiB per tile."""
    layout = KVLayout(1, 1, 64, _BLOCK, torch.bfloat16)
    blocks = [BlockId(1 + i) for i in range(2100)]
    chunk = Chunk([0] * TILE, 128 * TILE, blocks, wants_logits=False, wants_rows=False)
    tracemalloc.start()
    try:
        plan_groups([chunk], 128, None, layout, 2200 * _BLOCK, _CPU)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20
