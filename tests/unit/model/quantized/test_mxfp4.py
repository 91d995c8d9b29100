"""MXFP4 against the bits of the format, against transformers, and there and back."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from common.errors import ConfigError
from common.model.quantized.mxfp4 import dequantize_mxfp4, quantize_mxfp4

_SHAPE_OG = (7, 3)


def _decode(code: int) -> float:
    """The value of an E2M1 code: bias 1, one subnormal (OCP Microscaling Formats, 5.3.3)."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = (2 + mantissa) / 2 * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -magnitude if sign else magnitude


def _expected(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """[..., I, O] in float64."""
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*scales.shape, 32)
    values = np.array([_decode(code) for code in range(16)])[codes]
    scaled = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    return np.swapaxes(scaled.reshape(*scales.shape[:-1], -1), -1, -2)


def _random(leading: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code with every finite scale."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*leading, *_SHAPE_OG, 16), dtype=np.uint8)
    scales = random.integers(0, 253, (*leading, *_SHAPE_OG), dtype=np.uint8)
    scales.reshape(-1)[:2] = 0, 252
    return torch.from_numpy(blocks), torch.from_numpy(scales)


@pytest.mark.parametrize("leading", [(), (4,)])
def test_values_are_those_of_the_bits(leading: tuple[int, ...]) -> None:
    blocks, scales = _random(leading)
    out = dequantize_mxfp4(blocks, scales)
    assert out.dtype == torch.bfloat16
    assert out.shape == (*leading, 96, 7)
    expected = _expected(blocks.numpy(), scales.numpy())
    assert np.array_equal(out.double().numpy(), expected)
    assert np.array_equal(out.signbit().numpy(), np.signbit(expected))


def test_values_are_those_of_transformers_for_the_unquantised_tensor() -> None:
    blocks, scales = _random((4,))
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.shape == (4, 96, 7)  # [E, I, O]
    out = dequantize_mxfp4(blocks, scales)
    assert torch.equal(out.contiguous().view(torch.int16), expected.view(torch.int16))


def test_the_earlier_value_is_in_the_low_bits() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0] = 0xF2  # codes 2 and 15
    out = dequantize_mxfp4(blocks, torch.full((1, 1), 128, dtype=torch.uint8))
    assert out[:3, 0].tolist() == [2.0, -12.0, 0.0]


def test_quantising_rounds_to_the_nearest_and_ties_to_even() -> None:
    # The largest magnitude, 7, has exponent 2, so that the scale is 2^0 and 7 is clamped to 6.
    wanted = {0.0: 0, 0.25: 0, 0.26: 1, 0.75: 2, 1.25: 2, 1.3: 3, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6, 5.1: 7, 7.0: 7}
    weight = torch.zeros(32, 1)
    weight[: len(wanted), 0] = torch.tensor(list(wanted))
    weight[12, 0] = -3.0
    blocks, scales = quantize_mxfp4(weight)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten().tolist()
    assert scales.tolist() == [[127]]
    assert codes == [*wanted.values(), 0b1101, *[0] * 19]


def test_the_input_must_be_whole_groups() -> None:
    with pytest.raises(ConfigError, match="multiple of 32, got 48"):
        quantize_mxfp4(torch.zeros(2, 48, 8))


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
    exponent=st.integers(-130, 120),
    seed=st.integers(0, 2**32 - 1),
)
def test_quantising_takes_the_nearest_value_of_the_scale(shape: tuple[int, int, int], exponent: int, seed: int) -> None:
    num_experts, num_groups, num_outputs = shape
    weight = np.random.default_rng(seed).standard_normal((num_experts, 32 * num_groups, num_outputs))
    weight = np.ldexp(weight.astype(np.float32), exponent)
    blocks, scales = quantize_mxfp4(torch.from_numpy(weight))
    assert blocks.shape == (num_experts, num_outputs, num_groups, 16)
    assert scales.shape == (num_experts, num_outputs, num_groups)
    back = dequantize_mxfp4(blocks, scales).double().numpy()
    per_input = np.repeat(np.swapaxes(scales.numpy(), 1, 2), 32, axis=1).astype(np.int32)
    scaled = np.ldexp(weight.astype(np.float64), 127 - per_input)
    choices = np.array([_decode(code) for code in range(16)])
    nearest = np.abs(choices - scaled[..., None]).min(axis=-1)
    assert np.array_equal(np.abs(np.ldexp(back, 127 - per_input) - scaled), nearest)


@given(st.integers(0, 2**32 - 1))
def test_what_was_quantised_once_does_not_change_again(seed: int) -> None:
    once = dequantize_mxfp4(*_random((2,), seed))
    assert torch.equal(dequantize_mxfp4(*quantize_mxfp4(once)), once)
