"""Measures what this machine does at best: reading memory, and multiplying bf16 matrices."""

import mmap
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.bound import Roofline

#: Far more than any cache holds.
READ_BYTES = 2**30
#: Large enough for full rate, and some tens of milliseconds each.
MATRIX_SIZE = 2048
_DTYPES = (torch.bfloat16, torch.float32)


def measure_roofline(num_threads: int, repetitions: int = 7) -> Roofline:
    """The best of some repetitions: a bound is what the machine can do, not what it usually does."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return Roofline(_read_rate(repetitions), _matrix_rate(repetitions))
    finally:
        torch.set_num_threads(before)


def _read_rate(repetitions: int) -> float:
    """Bytes per second of a sum over memory on huge pages, where the kernel has them."""
    with mmap.mmap(-1, READ_BYTES) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        values = torch.frombuffer(memory, dtype=torch.float32)
        values.fill_(1.0)
        best = READ_BYTES / _fastest(values.sum, repetitions)
        del values  # the mapping cannot be closed while something points into it
    return best


def _matrix_rate(repetitions: int) -> float:
    """Operations per second of a product of two square bf16 matrices; a product and a sum are two operations.

    Or of matrices that were widened to fp32 ahead, which some processors multiply faster.
    """
    pair = tuple(torch.randn(MATRIX_SIZE, MATRIX_SIZE) for _ in range(2))
    times = [_fastest(partial(torch.matmul, *(a.to(dtype) for a in pair)), repetitions) for dtype in _DTYPES]
    return float(2 * MATRIX_SIZE**3 / min(times))


def _fastest(work: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(2 + repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[2:])
