"""A paged cache with sequences in it, for tests of attention. Shape suffixes as in `common.model.kernels.interface`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from common.kv.pool import BlockId
from common.kv.store import KVLayout, slots_of
from common.model.batch import Chunk
from common.model.kernels.interface import Kernels
from tests.unit.model.kernels.bounds import FP32, ROUNDOFF, Bounded, doubles, draw

_CPU = torch.device("cpu")
#: torch's kernels add the output of so many keys at a time, rounding each part to bf16.
_TORCH_TILE = 256


@dataclass(frozen=True)
class Heads:
    """Shapes of queries and cache; the defaults are no multiples of anything."""

    num_heads: int = 6
    num_kv_heads: int = 2
    key_dim: int = 18
    #: None: as keys; the cache has two planes. Otherwise one, whose leading dimensions are the value.
    value_dim: int | None = None
    block_size: int = 16


@dataclass(frozen=True)
class Queries:
    """Tokens [start, end) of one sequence: a chunk, or a decode step."""

    sequence: "Cached"
    start: int
    end: int


@dataclass(frozen=True)
class Cached:
    """Queries, keys and values of a sequence, the latter two in its blocks."""

    q_TND: torch.Tensor
    #: [C, T, G, D]
    kv_CTGD: torch.Tensor
    blocks: Sequence[BlockId]

    def tokens(self, start: int, end: int) -> Queries:
        return Queries(self, start, end)


@dataclass
class PagedCache:
    """Blocks are handed out in random order; everything in them that no sequence owns is NaN."""

    kernels: Kernels
    dtype: torch.dtype
    heads: Heads = Heads()
    num_slots: int = 8192
    _kv_CSGD: torch.Tensor = field(init=False)
    _free: list[BlockId] = field(init=False)

    def __post_init__(self) -> None:
        shape = (self._num_planes, self.num_slots, self.heads.num_kv_heads, self.heads.key_dim)
        self._kv_CSGD = torch.full(shape, float("nan"), dtype=self.dtype)
        num_blocks = self.num_slots // self.heads.block_size
        self._free = [BlockId(int(1 + block)) for block in np.random.default_rng(0).permutation(num_blocks - 1)]
        self._kv_CSGD[:, : self.heads.block_size] = 0  # the null block

    @property
    def _num_planes(self) -> int:
        return 2 if self.heads.value_dim is None else 1

    def sequence(self, length: int) -> Cached:
        heads, size = self.heads, self.heads.block_size
        blocks = [self._free.pop() for _ in range(-(-length // size))]
        kv = draw(self._num_planes, length, heads.num_kv_heads, heads.key_dim, dtype=self.dtype)
        q = draw(length, heads.num_heads, heads.key_dim, seed=1) * 2 * heads.key_dim**-0.5
        # What the owner has not written yet is zero, as the store clears it.
        self._kv_CSGD[:, slots_of(blocks, 0, len(blocks) * size, size)] = 0
        sequence = Cached(q.to(self.dtype), kv, blocks)
        self.rewrite(sequence)
        return sequence

    def rewrite(self, sequence: Cached) -> None:
        """Stores its keys and values, after a test changed them."""
        slots = slots_of(sequence.blocks, 0, sequence.kv_CTGD.shape[1], self.heads.block_size)
        self._kv_CSGD[:, slots] = sequence.kv_CTGD

    def attend(
        self, batch: Sequence[Queries], *, window: int | None = None, sinks_N: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Output [T, N, V] of each."""
        heads = self.heads
        layout = KVLayout(
            1, heads.num_kv_heads, heads.key_dim, heads.block_size, self.dtype, num_planes=self._num_planes
        )
        chunks = [
            Chunk([0] * (own.end - own.start), own.start, own.sequence.blocks, wants_logits=False, wants_rows=False)
            for own in batch
        ]
        plan = self.kernels.plan_attention(chunks, heads.num_heads, frozenset({window}), layout, self.num_slots, _CPU)
        q_TND = torch.cat([own.sequence.q_TND[own.start : own.end] for own in batch])
        out_TNV = plan.attend(q_TND, self._kv_CSGD, window=window, value_dim=heads.value_dim, sinks_N=sinks_N)
        return list(torch.split(out_TNV, [own.end - own.start for own in batch]))

    def expected(self, own: Queries, *, window: int | None = None, sinks_N: torch.Tensor | None = None) -> Bounded:
        """By the textbook: one softmax over all keys that a query sees; a sink adds to its sum and has no value."""
        values, errors = [], []
        for position in range(own.start, own.end):
            for head in range(self.heads.num_heads):
                sink = None if sinks_N is None else float(sinks_N[head])
                row = self._one(own.sequence, position, head, window, sink)
                values.append(row.value)
                errors.append(row.error)
        shape = (own.end - own.start, self.heads.num_heads, -1)
        return Bounded(np.stack(values).reshape(shape), np.stack(errors).reshape(shape)).rounded(self.dtype)

    def _one(self, sequence: Cached, position: int, head: int, window: int | None, sink: float | None) -> Bounded:
        first = 0 if window is None else max(0, position - window + 1)
        planes = doubles(
            sequence.kv_CTGD[:, first : position + 1, head * self.heads.num_kv_heads // self.heads.num_heads]
        )
        k, v = planes[0], planes[-1][:, : self.heads.value_dim or self.heads.key_dim]
        q = doubles(sequence.q_TND[position, head])
        scores, highest = k @ q, max((k @ q).max(), -np.inf if sink is None else sink)
        weights = np.exp(scores - highest)
        weights /= weights.sum() + (0 if sink is None else np.exp(sink - highest))
        roundoff = ROUNDOFF[self.dtype]
        score_error = 2 * self.heads.key_dim * FP32 * (np.abs(k) @ np.abs(q)) + 4 * FP32 * (
            np.abs(scores) + abs(highest)
        )
        error = 0.0
        if self.kernels.name == "torch":  # which rounds the scores, and what each tile adds
            score_error = score_error + roundoff * np.abs(scores)
            error = roundoff * (1 + position / _TORCH_TILE)
        # An error of a score moves its own weight, and through the sum all of them; weights are rounded once.
        relative = np.expm1(score_error) + (weights * np.expm1(score_error)).sum() + roundoff
        relative += 2 * (len(scores) + 16) * FP32 + error
        return Bounded(weights @ v, (weights * relative) @ np.abs(v) + 1e-30)
