"""Copies between the slots of K and V and contiguous memory. Shape suffixes as in `common.kv.store`.

Two implementations of one interface: `NativeCopies` on CPUs where `common.model.native` runs, `TorchCopies` elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.model import native
from common.model.native.interface import Memory, NativeModule

SlotArray = npt.NDArray[np.int64]

#: Consecutive slots, on average, from which on torch copies slice by slice: a slice moves at the speed of memory, but
#: costs some microseconds however short it is. An index costs the same per slot, and more for writing.
MIN_READ_RUN, MIN_WRITE_RUN = 64, 4


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive slots: numbers [begin, end) of a list of slots are slots `first`, `first` + 1, ..."""

    first: int
    begin: int
    end: int

    @property
    def here(self) -> slice:
        """Their places in the list."""
        return slice(self.begin, self.end)

    @property
    def slots(self) -> slice:
        """The slots themselves."""
        return slice(self.first, self.first + self.end - self.begin)


def runs_of(slots: SlotArray) -> Iterator[Run]:
    """The longest runs of consecutive slots, in order. Blocks that follow one another in memory are one run."""
    if not len(slots):
        return
    edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for begin, end in pairwise(edges):
        yield Run(int(slots[begin]), begin, end)


class Copies(Protocol):
    """How the slots of one cache are read and written. Memory holds [L, C, n, G, D] in the cache's dtype."""

    def gather(self, slots: SlotArray, to: Memory) -> None:
        """Copies n slots, in order, into memory of the host."""
        ...

    def scatter(self, slots: SlotArray, source: Memory) -> None:
        """Copies memory of the host into n slots, in order."""
        ...


def copies_of(kv_LCSGD: torch.Tensor) -> Copies:
    """The fastest ones for a cache."""
    variants = native.available() if kv_LCSGD.device.type == "cpu" else []
    return NativeCopies(native.load(variants[0]), kv_LCSGD) if variants else TorchCopies(kv_LCSGD)


class NativeCopies:
    """In C++: twice as fast as the C library's own copy, which is what slices come to."""

    def __init__(self, module: NativeModule, kv_LCSGD: torch.Tensor) -> None:
        assert kv_LCSGD.is_contiguous(), "one plane of slots after the other"
        num_layers, num_planes, num_slots, num_heads, head_dim = kv_LCSGD.shape
        slot_bytes = num_heads * head_dim * kv_LCSGD.itemsize
        self._module = module
        self._kv_LCSGD = kv_LCSGD
        self._planes = kv_LCSGD.data_ptr(), num_slots * slot_bytes, num_layers * num_planes, slot_bytes

    def gather(self, slots: SlotArray, to: Memory) -> None:
        self._module.gather(*self._planes, slots, to)

    def scatter(self, slots: SlotArray, source: Memory) -> None:
        self._module.scatter(*self._planes, slots, source)


class TorchCopies:
    """On any device."""

    def __init__(self, kv_LCSGD: torch.Tensor) -> None:
        self._kv_LCSGD = kv_LCSGD

    def gather(self, slots: SlotArray, to: Memory) -> None:
        if not len(slots):
            return
        runs, kv_LCSGD, to_LCNGD = list(runs_of(slots)), self._kv_LCSGD, self._view(to, len(slots))
        if not self._is_scattered(len(slots), len(runs), MIN_READ_RUN):
            for run in runs:
                to_LCNGD[:, :, run.here] = kv_LCSGD[:, :, run.slots]
        elif kv_LCSGD.device.type == "cpu":
            torch.index_select(kv_LCSGD, 2, torch.from_numpy(slots), out=to_LCNGD)
        else:
            to_LCNGD.copy_(kv_LCSGD.index_select(2, torch.from_numpy(slots).to(kv_LCSGD.device)))

    def scatter(self, slots: SlotArray, source: Memory) -> None:
        if not len(slots):
            return
        # torch wants memory that it could write to; transports give such memory, but for very small frames.
        readonly = isinstance(source, memoryview) and source.readonly
        kv_LCNGD = self._view(bytearray(source) if readonly else source, len(slots))
        runs, kv_LCSGD = list(runs_of(slots)), self._kv_LCSGD
        if self._is_scattered(len(slots), len(runs), MIN_WRITE_RUN):
            device = kv_LCSGD.device
            kv_LCSGD.index_copy_(2, torch.from_numpy(slots).to(device), kv_LCNGD.to(device))
            return
        for run in runs:
            kv_LCSGD[:, :, run.slots] = kv_LCNGD[:, :, run.here]

    def _view(self, memory: Memory | bytearray, num_slots: int) -> torch.Tensor:
        num_layers, num_planes, _, num_heads, head_dim = self._kv_LCSGD.shape
        flat = torch.frombuffer(memory, dtype=self._kv_LCSGD.dtype)
        return flat.view(num_layers, num_planes, num_slots, num_heads, head_dim)

    def _is_scattered(self, num_slots: int, num_runs: int, min_run: int) -> bool:
        # On a device every slice would be a transfer of its own.
        return num_runs > (max(1, num_slots // min_run) if self._kv_LCSGD.device.type == "cpu" else 1)
