"""The memory behind the block pool: K, V and routing rows, slot by slot.

Shape suffixes: L layers, C planes (0 is K, 1 is V; or one for both), S slots, G KV heads, D head size, K experts per
token. Slot `s` is token `s % block_size` of block `s // block_size`. KV lives on the device; rows live in host memory,
because they leave over the network.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.errors import RoutingMissingError
from common.kv.copies import Copies, SlotArray, copies_of, runs_of
from common.kv.pool import BlockId
from common.model.native.interface import Memory
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
    held = _slots_in(blocks[first : -(-end // block_size)], block_size)
    return held[start - first * block_size : end - first * block_size]


def _slots_in(blocks: Sequence[int], block_size: int) -> SlotArray:
    """All slots of the blocks, in order."""
    starts = np.array(blocks, np.int64) * block_size
    return (starts[:, None] + _offsets(block_size)).reshape(-1)


@functools.cache
def _offsets(block_size: int) -> SlotArray:
    return np.arange(block_size)


class KVStore:
    """K, V and routing rows of every slot.

    One thread (the engine's) computes into it; others may read or write slots that the engine gave them for a handoff,
    because no two parties ever hold the same slot for writing.

    Args:
        poison: fill freed blocks with NaN (KV) so that any use of stale data shows at once.
        copies: makes what reads and writes the slots of K and V.
    """

    def __init__(
        self,
        layout: KVLayout,
        routing: RoutingLayout,
        num_blocks: int,
        device: torch.device,
        *,
        poison: bool = False,
        copies: Callable[[torch.Tensor], Copies] = copies_of,
    ) -> None:
        self.layout = layout
        self.routing = routing
        self.num_blocks = num_blocks
        self.poison = poison
        num_slots = num_blocks * layout.block_size
        self.device = device
        self.is_on_host = device.type == "cpu"
        self._new_copies = copies
        self.rows_SLK: RoutingArray = routing.empty(num_slots)
        self._row_written = np.zeros(num_slots, np.bool_)
        self.restore()

    def restore(self) -> None:
        """Allocates K and V; every block is blank. Raises what torch raises when memory is out: RuntimeError."""
        layout = self.layout
        num_slots = self.num_blocks * layout.block_size
        shape = (layout.num_layers, layout.num_planes, num_slots, layout.num_kv_heads, layout.head_dim)
        self._set_kv(torch.zeros(shape, dtype=layout.dtype, device=self.device))
        if self.poison:
            self._poison(range(1, self.num_blocks))

    def release(self) -> None:
        """Gives the memory of K and V back until `restore`. No block may be in use; routing rows stay allocated."""
        self._set_kv(torch.empty((0,) * 5, dtype=self.layout.dtype, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _set_kv(self, kv_LCSGD: torch.Tensor) -> None:
        self.kv_LCSGD, self._copies = kv_LCSGD, self._new_copies(kv_LCSGD)

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Makes newly allocated blocks blank: zero K and V, no routing row. Masked attention reads zeros, never NaN."""
        for run in runs_of(_slots_in(blocks, self.layout.block_size)):
            self.kv_LCSGD[:, :, run.slots] = 0
            self._row_written[run.slots] = False

    def free_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Forgets the rows of freed blocks; with `poison` also ruins their content."""
        if not blocks:  # also while the memory is given back, when there is nothing to free
            return
        self._row_written[_slots_in(blocks, self.layout.block_size)] = False
        if self.poison:
            self._poison(blocks)

    def _poison(self, blocks: Iterable[int]) -> None:
        for run in runs_of(_slots_in(list(blocks), self.layout.block_size)):
            self.kv_LCSGD[:, :, run.slots] = float("nan")
            self.rows_SLK[run.slots] = np.iinfo(self.rows_SLK.dtype).max

    def has_rows(self, block: BlockId) -> bool:
        """Every slot of the block has its routing row."""
        size = self.layout.block_size
        return bool(self._row_written[block * size : (block + 1) * size].all())

    def read_kv(self, slots: SlotArray) -> torch.Tensor:
        """Contiguous host copy [L, C, n, G, D] of the given slots, in order."""
        out_LCNGD = torch.empty(self.kv_shape(len(slots)), dtype=self.layout.dtype)
        self.read_kv_bytes(slots, _bytes_of(out_LCNGD))
        return out_LCNGD

    def read_kv_bytes(self, slots: SlotArray, to: Memory) -> None:
        """As `read_kv`, into memory that is there already: `token_bytes` per slot."""
        self._copies.gather(slots, to)

    def write_kv(self, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        """Stores [L, C, n, G, D] into the given slots, in order."""
        self.write_kv_bytes(slots, _bytes_of(kv_LCNGD.to("cpu", self.layout.dtype).contiguous()))

    def write_kv_bytes(self, slots: SlotArray, source: Memory) -> None:
        """As `write_kv`, from memory that holds the bytes of such a tensor."""
        self._copies.scatter(slots, source)

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
        missing = self._row_written[slots].tobytes().find(0)
        if missing >= 0:
            raise RoutingMissingError(f"the routing row at offset {missing} of {len(slots)} was never recorded")
        return self.rows_SLK.take(slots, 0)

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


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a contiguous tensor of the host."""
    found: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
