"""Attention over the paged cache, in fixed tiles of keys, so that a query's result never depends on its batch.

The softmax is computed online (Milakov & Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135) over tiles of
`TILE` keys that start at absolute multiples of `TILE`. A query therefore goes through the same additions whether it is
computed alone, in a chunk, or beside other sequences; a tile in which it sees no key leaves its state as it is.

Shape suffixes: B sequences, T tokens, N query heads, G KV heads, D size of a cached key,
V of its value, S slots, C planes of the cache (K and V, or one that both are read from), R query rows of one KV head
(tokens × query heads per KV head, padded), X = B × G.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from common.kv.pool import NULL_BLOCK
from common.kv.store import KVLayout
from common.model.batch import Chunk
from common.model.layers import FP32_MULTIPLE, batched_product

#: Keys per tile; a multiple of every block size.
TILE = 256

#: Start of the running maximum: finite, so that a row that has seen no key yet rescales by exp(0), not by NaN.
_LOWEST = -1e30

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of keys for the first `num_sequences` sequences of a group (they are ordered longest first)."""

    num_sequences: int
    #: Rows of the layer's cache seen as [C S G, D], plane by plane: the keys of all heads, then the values; int64
    #: [C · X · TILE].
    cache_rows: torch.Tensor
    #: True where a token's queries, of whichever head, must not see the key, [B, 1, T, 1, TILE], T tokens per sequence;
    #: None if every query sees every key.
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Sequences with equally many query tokens, computed together; their tokens are consecutive in the batch."""

    tokens: slice
    num_sequences: int
    num_rows: int
    tiles: Sequence[Tile]

    def attend(
        self,
        q_TND: torch.Tensor,
        cache: torch.Tensor,
        num_kv_heads: int,
        *,
        value_dim: int | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output [T, N, V] for this group's (already scaled) queries.

        Args:
            cache: one layer of the store as [C S G, D].
            value_dim: V, the leading dimensions of a cached value, or of the cached key if there is only one plane.
                None: all D.
            sinks_N: fp32 logits of the sinks; None where there are none.
        """
        q_XRD = self._to_rows(q_TND, num_kv_heads)
        highest = self._start(q_XRD, num_kv_heads, sinks_N)
        # A sink is a key whose value is zero: it starts the maximum and the sum.
        total = torch.zeros_like(highest) if sinks_N is None else torch.ones_like(highest)
        output = q_XRD.new_zeros((*q_XRD.shape[:2], value_dim or q_XRD.shape[2]), dtype=torch.float32)
        query_heads = q_TND.shape[1] // num_kv_heads
        for tile in self.tiles:
            x = tile.num_sequences * num_kv_heads
            _accumulate(tile, q_XRD[:x], query_heads, cache, highest[:x], total[:x], output[:x])
        return self._from_rows((output / total).to(q_TND.dtype), len(q_TND), q_TND.shape[1])

    def _start(self, q_XRD: torch.Tensor, num_kv_heads: int, sinks_N: torch.Tensor | None) -> torch.Tensor:
        """The running maximum before the first key, fp32 [X, R, 1]."""
        if sinks_N is None:
            return q_XRD.new_full((*q_XRD.shape[:2], 1), _LOWEST, dtype=torch.float32)
        # Rows are query heads within tokens; those that pad belong to no head, and any finite start does for them.
        repeats = -(-self.num_rows * num_kv_heads // len(sinks_N))
        sinks_GR = sinks_N.view(num_kv_heads, -1).repeat(1, repeats)[:, : self.num_rows]
        return sinks_GR.repeat(self.num_sequences, 1).unsqueeze(-1)

    def _to_rows(self, q_TND: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        num_tokens, num_heads, head_dim = q_TND.shape
        per_sequence, per_kv_head = num_tokens // self.num_sequences, num_heads // num_kv_heads
        q = q_TND.view(self.num_sequences, per_sequence, num_kv_heads, per_kv_head, head_dim).transpose(1, 2)
        q_XRD = q.reshape(self.num_sequences * num_kv_heads, per_sequence * per_kv_head, head_dim)
        return F.pad(q_XRD, (0, 0, 0, self.num_rows - q_XRD.shape[1]))

    def _from_rows(self, output_XRV: torch.Tensor, num_tokens: int, num_heads: int) -> torch.Tensor:
        num_kv_heads = output_XRV.shape[0] // self.num_sequences
        per_sequence, per_kv_head = num_tokens // self.num_sequences, num_heads // num_kv_heads
        output = output_XRV[:, : per_sequence * per_kv_head]
        output = output.view(self.num_sequences, num_kv_heads, per_sequence, per_kv_head, -1).transpose(1, 2)
        return output.reshape(num_tokens, num_heads, -1)


def _accumulate(
    tile: Tile,
    q_XRD: torch.Tensor,
    query_heads: int,
    cache: torch.Tensor,
    highest: torch.Tensor,
    total: torch.Tensor,
    output_XRV: torch.Tensor,
) -> None:
    """Adds one tile to the running softmax, in place; all state is fp32."""
    planes = cache.index_select(0, tile.cache_rows).view(-1, len(q_XRD), TILE, cache.shape[1])
    k_XTD, v_XTV = planes[0], planes[-1][..., : output_XRV.shape[2]]
    scores_XRT = batched_product(q_XRD, k_XTD.transpose(1, 2)).float()
    if tile.hidden is not None:
        _hide(scores_XRT, tile.hidden, query_heads)
    new_highest = torch.maximum(highest, scores_XRT.amax(dim=-1, keepdim=True))
    weights_XRT = scores_XRT.sub_(new_highest).exp_()
    rescale = torch.exp(highest - new_highest)
    total.mul_(rescale).add_(weights_XRT.sum(dim=-1, keepdim=True))
    output_XRV.mul_(rescale).add_(batched_product(weights_XRT.to(v_XTV.dtype), v_XTV))
    highest.copy_(new_highest)


def _hide(scores_XRT: torch.Tensor, hidden: torch.Tensor, query_heads: int) -> None:
    """Takes hidden keys out, in place. Rows that pad keep theirs: keys are finite, and nobody reads the result."""
    num_sequences, _, num_tokens, _, _ = hidden.shape
    by_head = scores_XRT.view(num_sequences, -1, *scores_XRT.shape[1:])
    used = by_head[:, :, : num_tokens * query_heads]
    used.view(*by_head.shape[:2], num_tokens, query_heads, TILE).masked_fill_(hidden, float("-inf"))


def plan_groups(
    chunks: Sequence[Chunk], num_heads: int, window: int | None, layout: KVLayout, num_slots: int, device: torch.device
) -> list[QueryGroup]:
    """Groups a batch: leading single-token chunks, ordered longest first, together; every other chunk alone."""
    num_single = sum(len(chunk.token_ids) == 1 for chunk in chunks)
    parts = [chunks[:num_single]] if num_single else []
    parts += [[chunk] for chunk in chunks[num_single:]]
    groups, first = [], 0
    for part in parts:
        planner = _GroupPlanner(part, num_heads, window, layout, num_slots, device)
        num_tokens = sum(len(chunk.token_ids) for chunk in part)
        groups.append(QueryGroup(slice(first, first + num_tokens), len(part), planner.num_rows, planner.tiles()))
        first += num_tokens
    return groups


class _GroupPlanner:
    """Works out, on the host and once per batch, which cache rows and masks the tiles of one group need."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        num_heads: int,
        window: int | None,
        layout: KVLayout,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self._chunks = chunks
        self._window = window
        self._layout = layout
        self._num_slots = num_slots
        self._device = device
        self._num_tokens = len(chunks[0].token_ids)
        self.num_rows = -(-self._num_tokens * (num_heads // layout.num_kv_heads) // FP32_MULTIPLE) * FP32_MULTIPLE
        self._slots_BS = self._padded_slots()
        self._starts_B = np.array([chunk.start for chunk in chunks])

    def tiles(self) -> list[Tile]:
        first = 0 if self._window is None else max(0, min(c.start for c in self._chunks) - self._window + 1) // TILE
        last = self._slots_BS.shape[1] // TILE
        return [self._tile(index) for index in range(first, last)]

    def _tile(self, index: int) -> Tile:
        count = sum(chunk.end > index * TILE for chunk in self._chunks)
        slots_BT = self._slots_BS[:count, index * TILE : (index + 1) * TILE]
        heads = np.arange(self._layout.num_kv_heads)[:, None]
        keys = slots_BT[:, None, :] * self._layout.num_kv_heads + heads
        plane_rows = self._num_slots * self._layout.num_kv_heads
        rows = np.stack([keys + plane * plane_rows for plane in range(self._layout.num_planes)]).reshape(-1)
        return Tile(count, torch.from_numpy(rows).to(self._device), self._hidden(index, count))

    def _hidden(self, index: int, count: int) -> torch.Tensor | None:
        first_key, starts_B = index * TILE, self._starts_B[:count]
        # Most tiles of a long sequence: told apart first, because a mask costs more than the rest of the plan.
        is_past = first_key + TILE - 1 <= starts_B.min()
        if is_past and (self._window is None or first_key > starts_B.max() + self._num_tokens - 1 - self._window):
            return None
        keys_T = np.arange(first_key, first_key + TILE)
        positions = (starts_B[:, None] + np.arange(self._num_tokens))[:, None, :, None, None]
        hidden = keys_T > positions
        if self._window is not None:
            hidden |= keys_T <= positions - self._window
        return torch.from_numpy(hidden).to(self._device)

    def _padded_slots(self) -> IndexArray:
        """Slots of all positions up to a whole tile; the tail is the null block's slot, whose K and V are zero."""
        length = -(-max(chunk.end for chunk in self._chunks) // TILE) * TILE
        block_size = self._layout.block_size
        blocks = np.full((len(self._chunks), length // block_size), NULL_BLOCK, np.int64)
        for row, chunk in zip(blocks, self._chunks, strict=True):
            used = -(-chunk.end // block_size)
            row[:used] = chunk.blocks[:used]
        slots = (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(len(self._chunks), length)
        ends = np.array([chunk.end for chunk in self._chunks])
        slots[np.arange(length) >= ends[:, None]] = NULL_BLOCK * block_size
        return slots
