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
from common.model.native.interface import NativeModule

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
    """How slots are read and written. `kv_LCSGD` is contiguous."""

    def gather(self, kv_LCSGD: torch.Tensor, slots: SlotArray, out_LCNGD: torch.Tensor) -> None:
        """Copies the slots, in order, into contiguous host memory."""
        ...

    def scatter(self, kv_LCSGD: torch.Tensor, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        """Copies into the slots, in order."""
        ...


def copies_on(device: torch.device) -> Copies:
    """The fastest ones for memory on that device."""
    variants = native.available() if device.type == "cpu" else []
    return NativeCopies(native.load(variants[0])) if variants else TorchCopies()


class NativeCopies:
    """In C++: twice as fast as the C library's own copy, which is what slices come to."""

    def __init__(self, module: NativeModule) -> None:
        self._module = module

    def gather(self, kv_LCSGD: torch.Tensor, slots: SlotArray, out_LCNGD: torch.Tensor) -> None:
        assert out_LCNGD.dtype == kv_LCSGD.dtype, "bytes are copied"
        assert out_LCNGD.is_contiguous(), "one slot after the other"
        slots = np.ascontiguousarray(slots)
        self._module.gather(*_planes(kv_LCSGD), slots.ctypes.data, len(slots), out_LCNGD.data_ptr())

    def scatter(self, kv_LCSGD: torch.Tensor, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        slots, kv_LCNGD = np.ascontiguousarray(slots), kv_LCNGD.to(kv_LCSGD.dtype).contiguous()
        self._module.scatter(*_planes(kv_LCSGD), slots.ctypes.data, len(slots), kv_LCNGD.data_ptr())


def _planes(kv_LCSGD: torch.Tensor) -> tuple[int, int, int, int]:
    """Address, bytes of a plane, planes, bytes of a slot."""
    num_layers, num_planes, num_slots, num_heads, head_dim = kv_LCSGD.shape
    slot_bytes = num_heads * head_dim * kv_LCSGD.itemsize
    return kv_LCSGD.data_ptr(), num_slots * slot_bytes, num_layers * num_planes, slot_bytes


class TorchCopies:
    """On any device."""

    def gather(self, kv_LCSGD: torch.Tensor, slots: SlotArray, out_LCNGD: torch.Tensor) -> None:
        runs = list(runs_of(slots))
        if not _is_scattered(kv_LCSGD, len(slots), len(runs), MIN_READ_RUN):
            for run in runs:
                out_LCNGD[:, :, run.here] = kv_LCSGD[:, :, run.slots]
        elif kv_LCSGD.device.type == "cpu":
            torch.index_select(kv_LCSGD, 2, torch.from_numpy(slots), out=out_LCNGD)
        else:
            out_LCNGD.copy_(kv_LCSGD.index_select(2, torch.from_numpy(slots).to(kv_LCSGD.device)))

    def scatter(self, kv_LCSGD: torch.Tensor, slots: SlotArray, kv_LCNGD: torch.Tensor) -> None:
        runs = list(runs_of(slots))
        if _is_scattered(kv_LCSGD, len(slots), len(runs), MIN_WRITE_RUN):
            device = kv_LCSGD.device
            kv_LCSGD.index_copy_(2, torch.from_numpy(slots).to(device), kv_LCNGD.to(device))
            return
        for run in runs:
            kv_LCSGD[:, :, run.slots] = kv_LCNGD[:, :, run.here]


def _is_scattered(kv_LCSGD: torch.Tensor, num_slots: int, num_runs: int, min_run: int) -> bool:
    # On a device every slice would be a transfer of its own.
    return num_runs > (max(1, num_slots // min_run) if kv_LCSGD.device.type == "cpu" else 1)
