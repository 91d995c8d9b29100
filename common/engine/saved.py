"""What a sequence keeps in host memory, because it holds no blocks for it at the moment.

Shape suffixes as in `common.kv.store`, and N positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv.pool import BlockId
from common.kv.store import KVStore, slots_of
from common.routing.record import RoutingArray

#: Positions that are copied at a time: a device gathers them in memory of its own first, and may have little left.
PIECE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SavedRange:
    """Copy of KV and routing rows of positions [start, end) of one sequence."""

    start: int
    end: int
    kv_LCNGD: torch.Tensor
    #: None when no rows are wanted.
    rows_NLK: RoutingArray | None

    @classmethod
    def read(cls, store: KVStore, blocks: Sequence[BlockId], start: int, end: int, *, routing: bool) -> "SavedRange":
        """Copies the positions from the blocks of the sequence.

        Raises:
            RoutingMissingError: `routing`, and a position has no row.
            RuntimeError, MemoryError: memory is out.
        """
        slots = slots_of(blocks, start, end, store.layout.block_size)
        return cls(start, end, store.read_kv(slots), store.read_rows(slots) if routing else None)

    @property
    def num_bytes(self) -> int:
        return self.kv_LCNGD.nbytes + (0 if self.rows_NLK is None else self.rows_NLK.nbytes)

    def write(self, store: KVStore, blocks: Sequence[BlockId], start: int = 0) -> None:
        """Stores the copy, from position `start` on, where a sequence that owns `blocks` has those positions."""
        start = max(start, self.start)
        if start >= self.end:
            return
        slots, skipped = slots_of(blocks, start, self.end, store.layout.block_size), start - self.start
        store.write_kv(slots, self.kv_LCNGD[:, :, skipped:])
        if self.rows_NLK is not None:
            store.write_rows(slots, self.rows_NLK[skipped:])


def save(store: KVStore, blocks: Sequence[BlockId], end: int, *, routing: bool) -> tuple[SavedRange, ...]:
    """Positions [0, end) of the sequence that owns `blocks`, in order. Raises what `SavedRange.read` raises."""
    return tuple(
        SavedRange.read(store, blocks, start, min(end, start + PIECE_TOKENS), routing=routing)
        for start in range(0, end, PIECE_TOKENS)
    )


def prompt_tail(store: KVStore, blocks: Sequence[BlockId], num_prompt: int, *, routing: bool) -> tuple[SavedRange, ...]:
    """The positions that follow the prompt's last full block: what its choices cannot share. Nothing if it is full.

    A copy, and no reference to the block itself: choices that wait for blocks would otherwise keep one more block from
    those that run than a choice needs, and a request that just fits the pool could wait for itself.

    Raises:
        RoutingMissingError: `routing`, and a position has no row.
    """
    start = num_prompt - num_prompt % store.layout.block_size
    if start == num_prompt:
        return ()
    return (SavedRange.read(store, blocks, start, num_prompt, routing=routing),)
