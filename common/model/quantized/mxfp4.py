"""MXFP4 of the OCP Microscaling Formats specification (version 1.0), in the layout of gpt-oss.

32 neighbours along the input dimension share a scale, a power of two whose exponent is a byte (E8M0, bias 127). Each
value is four bits: sign, two bits of exponent, one bit of mantissa (E2M1). Two values share a byte, the earlier one in
the low four bits.

Shape suffixes: O output, I input, G groups of 32 inputs, B the 16 bytes of a group. Leading dimensions (experts) may
precede all of them. The unquantised tensor is [..., I, O], because gpt-oss multiplies from the left.
"""

import torch

from common.errors import ConfigError

GROUP_SIZE = 32
BYTES_PER_GROUP = GROUP_SIZE // 2

#: Magnitude by the three lower bits of a code.
_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
#: Halfway between neighbouring magnitudes.
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_SIGN_BIT = 8
#: Exponent of the power of two in the largest magnitude, 6 = 1.5 x 2^2.
_MAX_EXPONENT = 2

_BIAS = 127
#: Largest scale with which every code is finite in float32 and bfloat16; 255 stands for NaN.
MAX_SCALE = 252


def dequantize_mxfp4(blocks_OGB: torch.Tensor, scales_OG: torch.Tensor) -> torch.Tensor:
    """Bfloat16 [..., I, O], a transposed view; exact, because bfloat16 holds every product of value and scale.

    Args:
        blocks_OGB: uint8 [..., O, G, 16].
        scales_OG: uint8 [..., O, G], at most `MAX_SCALE`.
    """
    pairs = _byte_values().index_select(0, blocks_OGB.reshape(-1).int())
    values = pairs.view(*scales_OG.shape, GROUP_SIZE)
    factor = scales_OG.view(torch.float8_e8m0fnu).float().bfloat16()
    return values.mul_(factor.unsqueeze(-1)).flatten(-2).mT


def quantize_mxfp4(weight_IO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises as the specification suggests (6.3): scale 2^(floor(log2(largest magnitude)) - 2), values beyond the
    largest one clamped, ties rounded to an even code.

    Args:
        weight_IO: [..., I, O], finite.

    Returns:
        blocks, uint8 [..., O, G, 16], and scales, uint8 [..., O, G].

    Raises:
        ConfigError: I is not a multiple of 32.
    """
    num_inputs = weight_IO.shape[-2]
    if num_inputs % GROUP_SIZE:
        raise ConfigError(f"mxfp4 needs an input size that is a multiple of {GROUP_SIZE}, got {num_inputs}")
    weight_OI = weight_IO.float().mT.contiguous()
    groups = weight_OI.view(*weight_OI.shape[:-1], -1, GROUP_SIZE)
    # frexp puts the mantissa into [0.5, 1), so its exponent is one more than floor(log2).
    exponent = torch.frexp(groups.abs().amax(dim=-1)).exponent - 1 - _MAX_EXPONENT
    exponent = exponent.clamp(-_BIAS, MAX_SCALE - _BIAS)
    codes = _nearest_codes(torch.ldexp(groups, -exponent.unsqueeze(-1)))
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + _BIAS).to(torch.uint8)


def _nearest_codes(values: torch.Tensor) -> torch.Tensor:
    magnitudes = values.abs()
    # They differ for a tie only, where the even one counts.
    lower = torch.bucketize(magnitudes, _MIDPOINTS, right=False, out_int32=True)
    upper = torch.bucketize(magnitudes, _MIDPOINTS, right=True, out_int32=True)
    codes = torch.where(lower % 2 == 0, lower, upper)
    return (codes + _SIGN_BIT * values.signbit()).to(torch.uint8)


def _byte_values() -> torch.Tensor:
    """Bfloat16 [256, 2]: the two values of each byte."""
    codes = torch.cat((_MAGNITUDES, -_MAGNITUDES)).bfloat16()
    byte = torch.arange(256)
    return torch.stack((codes[byte & 0xF], codes[byte >> 4]), dim=1)
