"""Block-fp8 against the bits of the format, against transformers, and there and back."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import (
    Fp8Dequantize,
    _dequantize_fp8_weight,
)

from common.model.quantized.block_fp8 import Block, dequantize_block_fp8, quantize_block_fp8, scale_shape

# The input of DeepSeek-V3's attention has 576 output rows: four and a half blocks.
_RAGGED = [((576, 200), (128, 128)), ((5, 7), (2, 3)), ((3, 3), (128, 128)), ((130, 128), (128, 128))]
_EVEN = [((256, 128), (128, 128)), ((6, 8), (3, 2)), ((4, 64), (1, 32))]


def _decode(code: int) -> float:
    """The value of an E4M3 byte: bias 7, subnormals below exponent 1 (OCP 8-bit floating point, 5.3)."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = (8 + mantissa) / 8 * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if sign else magnitude


def _random_weight(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any finite FP8 values: 0x7f and 0xff are NaN."""
    codes = np.random.default_rng(seed).integers(0, 254, shape, dtype=np.uint8)
    codes[codes >= 127] += 1
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def _random_scale(shape: tuple[int, ...], block: Block) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(scale_shape(shape, block), generator=generator) * 1e-3 + 1e-6


def _expected(weight: torch.Tensor, scale: torch.Tensor, block: Block) -> npt.NDArray[np.float32]:
    values = np.array([_decode(code) for code in range(256)], np.float32)[weight.view(torch.uint8).numpy()]
    rows, columns = np.indices(values.shape)
    products: npt.NDArray[np.float32] = values * scale.numpy()[rows // block[0], columns // block[1]]
    return products


@pytest.mark.parametrize(("shape", "block"), _RAGGED + _EVEN)
def test_values_are_those_of_the_bits(shape: tuple[int, int], block: Block) -> None:
    weight, scale = _random_weight(shape), _random_scale(shape, block)
    out = dequantize_block_fp8(weight, scale, block)
    assert out.dtype == torch.float32
    assert np.array_equal(out.numpy().view(np.uint32), _expected(weight, scale, block).view(np.uint32))


@pytest.mark.parametrize(("shape", "block"), _RAGGED + _EVEN)
def test_values_are_those_of_transformers(shape: tuple[int, int], block: Block) -> None:
    weight, scale = _random_weight(shape), _random_scale(shape, block)
    out = dequantize_block_fp8(weight, scale, block)
    assert torch.equal(out, _dequantize_fp8_weight(weight, scale, list(block), torch.float32))


@pytest.mark.parametrize(("shape", "block"), _EVEN)
def test_rounded_once_they_are_those_that_transformers_loads(shape: tuple[int, int], block: Block) -> None:
    weight, scale = _random_weight(shape), _random_scale(shape, block)
    loader = Fp8Dequantize(None)  # type: ignore[no-untyped-call]
    expected = loader._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
    assert torch.equal(dequantize_block_fp8(weight, scale, block).bfloat16(), expected)


def test_scales_of_fewer_bits_are_widened() -> None:
    weight = torch.tensor([[1.0, -3.5]]).to(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float8_e8m0fnu):
        scale = torch.tensor([[0.25]]).to(dtype)
        assert dequantize_block_fp8(weight, scale, (128, 128)).tolist() == [[0.25, -0.875]]


def test_the_largest_value_of_a_block_takes_the_largest_code() -> None:
    weight = torch.tensor([[7.0, 0.0, -1.0], [-3.5, 0.0, 0.0]])
    quantized, scale_inv = quantize_block_fp8(weight, (2, 2))
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale_inv.tolist() == [[7 / 448, torch.tensor(1 / 448).item()]]
    assert quantized.float().tolist() == [[448.0, 0.0, -448.0], [-224.0, 0.0, 0.0]]


def test_zeros_stay_zeros() -> None:
    quantized, scale_inv = quantize_block_fp8(torch.zeros(3, 3), (2, 2))
    assert scale_inv.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert dequantize_block_fp8(quantized, scale_inv, (2, 2)).tolist() == [[0.0] * 3] * 3


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    exponent=st.integers(-140, 120),
    seed=st.integers(0, 2**32 - 1),
)
def test_there_and_back_loses_no_more_than_the_mantissa(
    shape: tuple[int, int], block: Block, exponent: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weight = torch.from_numpy(np.ldexp(random.standard_normal(shape).astype(np.float32), exponent))
    quantized, scale_inv = quantize_block_fp8(weight, block)
    assert quantized.shape == weight.shape
    assert scale_inv.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    back = dequantize_block_fp8(quantized, scale_inv, block)
    # Half of the last of three mantissa bits; half of the smallest subnormal, 2^-9, near zero.
    rows, columns = np.indices(shape)
    step = scale_inv.double().numpy()[rows // block[0], columns // block[1]] * 2.0**-10
    bound = np.maximum(np.abs(weight.double().numpy()) * 2.0**-4, step) * (1 + 1e-5)
    assert (np.abs(back.double().numpy() - weight.double().numpy()) <= bound).all()


def test_a_block_far_larger_than_the_weight_takes_no_memory() -> None:
    block, weight = (2**40, 2**40), torch.tensor([[448.0, 1.0], [0.0, -2.0]])
    stored, scale = quantize_block_fp8(weight, block)
    assert (stored.shape, scale.tolist()) == ((2, 2), [[1.0]])
    assert torch.equal(dequantize_block_fp8(stored, scale, block), weight)
