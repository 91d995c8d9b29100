"""What one prompt's choices cannot share: the block in which the prompt ends and the generated tokens begin."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kv.pool import BlockId
from common.kv.store import KVStore, slots_of
from common.routing.record import RoutingArray


@dataclass(frozen=True, slots=True)
class PromptTail:
    """Copy, in host memory, of the prompt's positions [start, end) that follow its last full block.

    A copy, and no reference to the block itself: choices that wait for blocks would otherwise keep one more block from
    those that run than a choice needs, and a request that just fits the pool could wait for itself.
    """

    start: int
    end: int
    kv_L2NGD: torch.Tensor
    #: None when no rows are wanted.
    rows_NLK: RoutingArray | None

    @classmethod
    def read(cls, store: KVStore, blocks: Sequence[BlockId], num_prompt: int, *, routing: bool) -> "PromptTail | None":
        """None when the prompt fills its last block.

        Raises:
            RoutingMissingError: `routing`, and a position has no row.
        """
        block_size = store.layout.block_size
        start = num_prompt - num_prompt % block_size
        if start == num_prompt:
            return None
        slots = slots_of(blocks, start, num_prompt, block_size)
        return cls(start, num_prompt, store.read_kv(slots), store.read_rows(slots) if routing else None)

    def write(self, store: KVStore, blocks: Sequence[BlockId]) -> None:
        """Stores the copy where a sequence that owns `blocks` has those positions."""
        slots = slots_of(blocks, self.start, self.end, store.layout.block_size)
        store.write_kv(slots, self.kv_L2NGD)
        if self.rows_NLK is not None:
            store.write_rows(slots, self.rows_NLK)
