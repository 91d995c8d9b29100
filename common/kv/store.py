"""The memory behind the block pool: K, V and routing rows, slot by slot.

Shape suffixes: L layers, C planes (0 is K, 1 is V; or one for both), S slots, G KV heads, D head size, K experts per
token. Slot `s` is token `s % block_size` of block `s // block_size`. KV lives on the device; rows live in host memory,
because they leave over the network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.errors import RoutingMissingError
from common.kv.pool import BlockId
from common.routing.record import RoutingArray, RoutingLayout

SlotArray = npt.NDArray[np.int64]


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
    positions = np.arange(start, end)
    return np.asarray(blocks, np.int64)[positions // block_size] * block_size + positions % block_size


class KVStore:
    """K, V and routing rows of every slot.

    One thread (the engine's) computes into it; others may read or write slots that the engine gave them for a handoff,
    because no two parties ever hold the same slot for writing.

    Args:
        poison: fill freed blocks with NaN (KV) so that any use of stale data shows at once.
    """

    def __init__(
        self, layout: KVLayout, routing: RoutingLayout, num_blocks: int, device: torch.device, *, poison: bool = False
    ) -> None:
        self.layout = layout
        self.routing = routing
        self.num_blocks = num_blocks
        self.poison = poison
        num_slots = num_blocks * layout.block_size
        self.device = device
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
        slots = self._block_slots(blocks)
        self.kv_LCSGD[:, :, torch.from_numpy(slots)] = 0
        self._row_written[slots] = False

    def free_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Forgets the rows of freed blocks; with `poison` also ruins their content."""
        if not blocks:  # also while the memory is given back, when there is nothing to free
            return
        self._row_written[self._block_slots(blocks)] = False
        if self.poison:
            self._poison(blocks)

    def _poison(self, blocks: Iterable[int]) -> None:
        slots = self._block_slots(list(blocks))
        self.kv_LCSGD[:, :, torch.from_numpy(slots)] = float("nan")
        self.rows_SLK[slots] = np.iinfo(self.rows_SLK.dtype).max

    def _block_slots(self, blocks: Sequence[int]) -> SlotArray:
        starts = np.asarray(blocks, np.int64) * self.layout.block_size
        return (starts[:, None] + np.arange(self.layout.block_size)).reshape(-1)

    def has_rows(self, block: BlockId) -> bool:
        """Every slot of the block has its routing row."""
        size = self.layout.block_size
        return bool(self._row_written[block * size : (block + 1) * size].all())

    def read_kv(self, slots: SlotArray) -> torch.Tensor:
        """Contiguous host copy [L, C, n, G, D] of the given slots, in order."""
        return self.kv_LCSGD.index_select(2, torch.from_numpy(slots).to(self.kv_LCSGD.device)).cpu()

    def write_kv(self, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        """Stores [L, C, n, G, D] into the given slots, in order."""
        device = self.kv_LCSGD.device
        self.kv_LCSGD.index_copy_(2, torch.from_numpy(slots).to(device), kv_LCNGD.to(device))

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
