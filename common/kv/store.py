"""The memory behind the block pool: K, V and routing rows, slot by slot.

Shape suffixes: L layers, C planes (0 is K, 1 is V; or one for both), S slots, G KV heads, D head size, K experts per
token. Slot `s` is token `s % block_size` of block `s // block_size`. KV lives on the device; rows live in host memory,
because they leave over the network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import RoutingMissingError
from common.kv.copies import Copies, SlotArray, copies_on, runs_of
from common.kv.pool import BlockId
from common.routing.record import RoutingArray, RoutingLayout


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the cache; equal on every worker of a cluster but for `num_blocks`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    #: Vectors per token, layer and head: K and V, or one compressed vector that both are read from.
    num_planes: int = 2

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V that one token needs in all layers."""
        return self.num_layers * self.num_planes * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def slots_of(blocks: Sequence[BlockId], start: int, end: int, block_size: int) -> SlotArray:
    """Slots of positions [start, end) of a sequence that owns `blocks`, int64 [end - start]."""
    # Of the blocks only those that hold the positions are looked at: a long sequence has thousands.
    first = start // block_size
    positions = np.arange(start - first * block_size, end - first * block_size)
    held = np.asarray(blocks[first : -(-end // block_size)], np.int64)
    return held[positions // block_size] * block_size + positions % block_size


class KVStore:
    """K, V and routing rows of every slot.

    One thread (the engine's) computes into it; others may read or write slots that the engine gave them for a handoff,
    because no two parties ever hold the same slot for writing.

    Args:
        poison: fill freed blocks with NaN (KV) so that any use of stale data shows at once.
        copies: how slots are read and written; None: the fastest way on `device`.
    """

    def __init__(
        self,
        layout: KVLayout,
        routing: RoutingLayout,
        num_blocks: int,
        device: torch.device,
        *,
        poison: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self.layout = layout
        self.routing = routing
        self.num_blocks = num_blocks
        self.poison = poison
        num_slots = num_blocks * layout.block_size
        self.device = device
        self._copies = copies or copies_on(device)
        self.rows_SLK: RoutingArray = routing.empty(num_slots)
        self._row_written = np.zeros(num_slots, np.bool_)
        self.restore()

    def restore(self) -> None:
        """Allocates K and V; every block is blank. Raises what torch raises when memory is out: RuntimeError."""
        layout = self.layout
        num_slots = self.num_blocks * layout.block_size
        self.kv_LCSGD = torch.zeros(
            (layout.num_layers, layout.num_planes, num_slots, layout.num_kv_heads, layout.head_dim),
            dtype=layout.dtype,
            device=self.device,
        )
        if self.poison:
            self._poison(range(1, self.num_blocks))

    def release(self) -> None:
        """Gives the memory of K and V back until `restore`. No block may be in use; routing rows stay allocated."""
        self.kv_LCSGD = torch.empty(0, dtype=self.layout.dtype, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Makes newly allocated blocks blank: zero K and V, no routing row. Masked attention reads zeros, never NaN."""
        for run in runs_of(self._block_slots(blocks)):
            self.kv_LCSGD[:, :, run.slots] = 0
            self._row_written[run.slots] = False

    def free_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Forgets the rows of freed blocks; with `poison` also ruins their content."""
        if not blocks:  # also while the memory is given back, when there is nothing to free
            return
        self._row_written[self._block_slots(blocks)] = False
        if self.poison:
            self._poison(blocks)

    def _poison(self, blocks: Iterable[int]) -> None:
        for run in runs_of(self._block_slots(list(blocks))):
            self.kv_LCSGD[:, :, run.slots] = float("nan")
            self.rows_SLK[run.slots] = np.iinfo(self.rows_SLK.dtype).max

    def _block_slots(self, blocks: Sequence[int]) -> SlotArray:
        starts = np.asarray(blocks, np.int64) * self.layout.block_size
        return (starts[:, None] + np.arange(self.layout.block_size)).reshape(-1)

    def has_rows(self, block: BlockId) -> bool:
        """Every slot of the block has its routing row."""
        size = self.layout.block_size
        return bool(self._row_written[block * size : (block + 1) * size].all())

    def read_kv(self, slots: SlotArray) -> torch.Tensor:
        """Contiguous host copy [L, C, n, G, D] of the given slots, in order."""
        out_LCNGD = torch.empty(self.kv_shape(len(slots)), dtype=self.layout.dtype)
        self.read_kv_into(slots, out_LCNGD)
        return out_LCNGD

    def read_kv_into(self, slots: SlotArray, out_LCNGD: torch.Tensor) -> None:
        """As `read_kv`, into contiguous host memory that is there already."""
        self._copies.gather(self.kv_LCSGD, slots, out_LCNGD)

    def write_kv(self, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        """Stores [L, C, n, G, D] into the given slots, in order."""
        self._copies.scatter(self.kv_LCSGD, slots, kv_LCNGD)

    def kv_shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """[L, C, n, G, D] of so many tokens."""
        layout = self.layout
        return layout.num_layers, layout.num_planes, num_tokens, layout.num_kv_heads, layout.head_dim

    def write_rows(self, slots: SlotArray, rows_NLK: RoutingArray) -> None:
        """Stores one routing row per slot."""
        self.rows_SLK[slots] = rows_NLK
        self._row_written[slots] = True

    def read_rows(self, slots: SlotArray) -> RoutingArray:
        """Copy [n, L, K] of the rows of the given slots.

        Raises:
            RoutingMissingError: a slot has no row, because no forward pass or handoff wrote it.
        """
        if not self._row_written[slots].all():
            missing = int(np.argmin(self._row_written[slots]))
            raise RoutingMissingError(f"the routing row at offset {missing} of {len(slots)} was never recorded")
        return self.rows_SLK[slots]

    def read_row_range(self, blocks: Sequence[BlockId], start: int, end: int) -> RoutingArray:
        """Copy [end - start, L, K] of the rows of positions [start, end) of the sequence that owns `blocks`.

        Costs what those positions cost, however many blocks the sequence has. Raises as `read_rows`.
        """
        size = self.layout.block_size
        if end - start == 1:  # the row of a decode step
            slot = blocks[start // size] * size + start % size
            if self._row_written[slot]:
                return self.rows_SLK[slot : slot + 1].copy()
        return self.read_rows(slots_of(blocks, start, end, size))
