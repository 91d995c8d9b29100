"""Buffers come back when the last view of them is gone, and never before."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from common.handoff.staging import MAX_KEPT_BYTES, Bytes, Staging


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    staging = Staging(64)
    lent = staging.lend(10)
    assert (lent.nbytes, staging.num_made) == (10, 1)
    del lent
    assert staging.lend(64).nbytes == 64
    assert staging.num_made == 1


VIEWS: dict[str, Callable[[Bytes], memoryview]] = {
    "memoryview": lambda lent: lent.data[3:5],
    "slice": lambda lent: lent[3:5].data,
    "torch": lambda lent: torch.from_numpy(lent).view(torch.int32).numpy().data,
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_view_keeps_the_memory_from_others(view: str) -> None:
    staging = Staging(64)
    lent = staging.lend(64)
    lent[:] = 7
    held = VIEWS[view](lent)
    del lent
    staging.lend(64)[:] = 9
    assert staging.num_made == 2
    assert set(held.tobytes()) == {7}
    del held
    several = [staging.lend(64), staging.lend(64)]
    assert staging.num_made == len(several)


def test_only_so_much_is_kept() -> None:
    staging = Staging(MAX_KEPT_BYTES // 2)
    lent = [staging.lend(1) for _ in range(3)]
    lent.clear()
    lent = [staging.lend(1) for _ in range(3)]
    assert staging.num_made == 4


def test_lent_memory_can_be_written() -> None:
    lent = Staging(8).lend(8)
    lent.view(np.uint16)[:] = 257
    assert bytes(lent) == bytes([1] * 8)
