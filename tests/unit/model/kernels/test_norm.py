"""Addition and root-mean-square norm against NumPy in double precision."""

import numpy as np
import pytest
import torch

from common.model.kernels.interface import Kernels
from tests.unit.model.kernels.bounds import FP32, ROUNDOFF, Bounded, doubles, draw

_SIZES = (1, 2, 15, 16, 18, 76, 2048)


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_norm(kernels: Kernels, dtype: torch.dtype, num_rows: int, size: int, eps: float) -> None:
    x, weight = draw(num_rows, size, dtype=dtype), draw(size, dtype=dtype, seed=1)
    before = x.clone()
    normed = kernels.add_norm(x, None, weight, eps)
    assert torch.equal(x, before)
    _check(normed, x, weight, eps)


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_what_is_added_stays_and_the_norm_is_that_of_the_rounded_sum(
    kernels: Kernels, dtype: torch.dtype, num_rows: int, size: int
) -> None:
    x, delta, weight = (draw(*shape, dtype=dtype, seed=7) for shape in ((num_rows, size), (num_rows, size), (size,)))
    delta = delta.flip(0) * 3
    total, kept = doubles(x) + doubles(delta), delta.clone()
    normed = kernels.add_norm(x, delta, weight, 1e-6)
    # One rounding of the exact sum; torch rounds double to bf16 by way of fp32, which can differ by the last bit.
    Bounded(total, np.abs(total) * ROUNDOFF[dtype] * (1 + 2**-10)).check(x)
    assert torch.equal(delta, kept)
    _check(normed, x, weight, 1e-6)


def _check(normed: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    values, size = doubles(x), x.shape[1]
    expected = values / np.sqrt((values**2).mean(axis=1, keepdims=True) + eps) * doubles(weight)
    # The mean of squares, its root, and two products.
    Bounded(expected, np.abs(expected) * 2 * (size + 8) * FP32).rounded(x.dtype).check(normed)
