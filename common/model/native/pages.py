"""Memory on huge pages: weights are read from end to end in every step, and with small pages address translation is a
good part of that time."""

import contextlib
import ctypes
import mmap
import threading

import torch

#: Of x86-64 and most others.
HUGE_PAGE_BYTES = 2**21
#: Small weights share a region; only what is written to takes memory.
REGION_BYTES = 16 * HUGE_PAGE_BYTES
#: A cache line: what the kernels load at a time never crosses two.
ALIGNMENT = 64


class HugePages:
    """Cuts tensors from regions of huge pages. A region's memory goes back to the system with its last tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], all zero. Raises MemoryError when memory is out."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._used + size > len(self._region):
                self._region, self._used = _region(max(size, REGION_BYTES)), 0
            start, self._used = self._used, self._used + size
            return self._region[start : start + num_bytes]


def _region(num_bytes: int) -> torch.Tensor:
    """Begins at a huge page, and is made of such pages where the system grants them."""
    try:
        region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {num_bytes} bytes for weights: {error.strerror}") from error
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without such pages
        region.madvise(mmap.MADV_HUGEPAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_PAGE_BYTES
    return torch.frombuffer(region, dtype=torch.uint8, count=num_bytes, offset=start)
