"""Rows are independent of each other, over shapes that take every kernel; values against NumPy in double precision."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.model.layers import batched_product, clamped_swiglu, linear, prepare_weight, rms_norm, silu_gated

#: Outputs and inputs: tiny, odd, and large enough for the blocked kernels.
_SHAPES = [(3, 50), (7, 76), (8, 64), (64, 32), (74, 75), (257, 64), (512, 256), (32, 1024), (48, 1040), (96, 2880)]
_DTYPES = [torch.float32, torch.bfloat16]


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = np.random.default_rng(list(shape))
    return torch.from_numpy(random.standard_normal(shape, np.float32)).to(dtype)


def _double(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    return tensor.double().numpy()


def _assert_rows_independent(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    whole = function(x)
    for size in (1, 2, 3, 5, 8, 16, 17, 33, 100):
        parts = [function(part) for part in torch.split(x[:600], size)]
        assert torch.equal(torch.cat(parts), whole[:600]), f"{size} rows at a time"


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), _SHAPES)
def test_linear_rows_are_independent(num_outputs: int, num_inputs: int, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    weight = prepare_weight(_draw(num_outputs, num_inputs, dtype=dtype))
    _assert_rows_independent(lambda x: linear(x, weight), _draw(1024, num_inputs, dtype=dtype))


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), _SHAPES)
def test_linear_does_not_depend_on_threads(num_outputs: int, num_inputs: int, dtype: torch.dtype, threads: int) -> None:
    x, weight = _draw(1024, num_inputs, dtype=dtype), prepare_weight(_draw(num_outputs, num_inputs, dtype=dtype))
    alone = linear(x, weight)
    torch.set_num_threads(threads)
    for num_rows in (1, 7, 16, 50, 1024):
        assert torch.equal(linear(x[:num_rows], weight), alone[:num_rows])


@pytest.mark.parametrize("dtype", _DTYPES)
def test_linear_is_the_product_plus_the_bias(dtype: torch.dtype) -> None:
    x, weight, bias = _draw(5, 76, dtype=dtype), _draw(7, 76, dtype=dtype), _draw(7, dtype=dtype)
    expected = _double(x) @ _double(weight).T + _double(bias)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    np.testing.assert_allclose(_double(linear(x, weight, bias)), expected, atol=tolerance)


def test_a_bf16_product_is_rounded_before_its_bias_is_added() -> None:
    """By hand, with steps of 2 between 256 and 512: 257 goes to 256 and stays there; in one sum it would be 258."""
    x, weight = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.ones(3, 2).bfloat16()
    assert linear(x, weight, torch.tensor([0.0, 1.0, 2.0]).bfloat16()).tolist() == [[256.0, 256.0, 258.0]]


@pytest.mark.parametrize(("num_outputs", "num_inputs"), _SHAPES)
def test_a_prepared_weight_computes_the_same_product(num_outputs: int, num_inputs: int) -> None:
    x, weight = _draw(9, num_inputs, dtype=torch.bfloat16), _draw(num_outputs, num_inputs, dtype=torch.bfloat16)
    expected = _double(x) @ _double(weight).T
    rounding = 2**-8 * np.abs(expected) + 1e-3  # half a unit in the last place of bf16, and the sum's own error
    assert (np.abs(_double(linear(x, prepare_weight(weight))) - expected) <= rounding).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("num_outputs", [16, 18, 64, 100])
def test_batched_products_are_independent(num_outputs: int, dtype: torch.dtype, threads: int) -> None:
    a, b = _draw(8, 48, 256, dtype=dtype), _draw(8, 256, num_outputs, dtype=dtype)
    whole = batched_product(a, b)
    torch.set_num_threads(threads)
    for size in (1, 2, 3, 8):
        for rows in (slice(0, 16), slice(16, 48), slice(0, 48)):
            assert torch.equal(batched_product(a[:size, rows].contiguous(), b[:size]), whole[:size, rows])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("width", [36, 64, 75])
def test_elementwise_rows_are_independent(width: int, dtype: torch.dtype) -> None:
    _assert_rows_independent(silu_gated, _draw(700, 2 * width, dtype=dtype))
    _assert_rows_independent(lambda x: clamped_swiglu(x, 1.702, 1.5), _draw(700, 2 * width, dtype=dtype))
    weight = _draw(width, dtype=dtype)
    _assert_rows_independent(lambda x: rms_norm(x, weight, 1e-6), _draw(700, width, dtype=dtype))


def test_silu_gated_is_silu_of_the_gate_times_up() -> None:
    gate, up = _draw(3, 20), _draw(4, 20)[:3]
    expected = _double(gate) / (1 + np.exp(-_double(gate))) * _double(up)
    np.testing.assert_allclose(silu_gated(torch.cat((gate, up), dim=1)).numpy(), expected, rtol=1e-5)


#: Gates and up values inside the limit, at it, just beyond, and as large as the type allows.
_EXTREMES = [0.0, -0.0, 1e-30, 0.5, -0.5, 6.9, 7.0, 7.1, -7.0, -7.1, 50.0, -50.0, -90.0, -1e4, 1e4, 3e38, -3e38]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (0.5, 1.25)])
def test_clamped_swiglu_bounds_the_gate_above_and_the_rest_on_both_sides(
    dtype: torch.dtype, alpha: float, limit: float
) -> None:
    gate, up = (t.flatten().to(dtype) for t in torch.meshgrid(*[torch.tensor(_EXTREMES)] * 2, indexing="ij"))
    got = clamped_swiglu(torch.stack((gate, up), dim=1), alpha, limit)
    bounded, shifted = np.minimum(_double(gate), limit), np.clip(_double(up), -limit, limit) + 1
    with np.errstate(over="ignore"):  # where the sigmoid is 0
        expected = bounded / (1 + np.exp(-alpha * bounded)) * shifted
    assert got.dtype == dtype
    assert got.shape == (len(_EXTREMES) ** 2, 1)
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    np.testing.assert_allclose(_double(got)[:, 0], expected, rtol=rtol, atol=1e-35)


def test_clamped_swiglu_takes_halves_not_alternating_columns() -> None:
    gate, up = _draw(3, 20), _draw(4, 20)[:3]
    expected = _double(gate) / (1 + np.exp(-1.702 * _double(gate))) * (_double(up) + 1)
    np.testing.assert_allclose(clamped_swiglu(torch.cat((gate, up), dim=1), 1.702, 7.0).numpy(), expected, rtol=1e-5)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = _draw(3, 20), _draw(20)
    expected = _double(x) / np.sqrt(np.mean(_double(x) ** 2, axis=1, keepdims=True) + 1e-6) * _double(weight)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6).numpy(), expected, rtol=1e-5)
