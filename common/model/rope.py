"""Rotary position embedding: frequencies for every supported kind of scaling, and a table over the positions in use.

Shape suffixes: P positions of the table, T tokens, N heads, D head size, R = D / 2 rotated pairs.
"""

import math

import numpy as np
import torch

from common.model.config import ModelConfig, RopeConfig

#: Positions computed at a time: the double-precision temporaries stay at a few megabytes, however long the table is.
_SLAB = 8192


class RotaryTable:
    """Cosine and sine of positions 0 to `num_positions` - 1, fp32 [P, R], computed once: a look-up is exact, a
    computation in a batch may differ in the last bit between the vector loop and its scalar tail.
    """

    def __init__(self, config: ModelConfig, device: torch.device, num_positions: int) -> None:
        frequencies_R = rotary_frequencies(config.rope, config.head_dim).numpy()
        factor = config.rope.parameters.get("attention_factor", 1.0)
        cos_PR, sin_PR = np.empty((2, num_positions, len(frequencies_R)), np.float32)
        for start in range(0, num_positions, _SLAB):
            slab = slice(start, min(start + _SLAB, num_positions))
            # The fp32 angle is what transformers uses; its cosine is taken in double precision and rounded once.
            angles_PR = np.arange(slab.start, slab.stop).astype(np.float32)[:, None] * frequencies_R
            cos_PR[slab] = np.cos(angles_PR, dtype=np.float64) * factor
            sin_PR[slab] = np.sin(angles_PR, dtype=np.float64) * factor
        self._cos_PR, self._sin_PR = torch.from_numpy(cos_PR).to(device), torch.from_numpy(sin_PR).to(device)

    def look_up(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the positions, each [T, 1, R], ready to broadcast over heads."""
        return self._cos_PR[positions_T].unsqueeze(1), self._sin_PR[positions_T].unsqueeze(1)


def rotate(x_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + R) of every head."""
    first, second = x_TND.chunk(2, dim=-1)
    return torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair, fp32 [R]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return frequencies / rope.parameters["factor"]
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(frequencies, rope, head_dim)
        case _:
            return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, original_length = rope.parameters["factor"], rope.parameters["original_length"]
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    kept = ((original_length / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., arXiv 2309.00071): a ramp over dimensions between stretched and kept frequencies."""
    low = _yarn_dimension(rope.parameters["beta_fast"], rope, head_dim)
    high = _yarn_dimension(rope.parameters["beta_slow"], rope, head_dim)
    if rope.parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies / rope.parameters["factor"] * stretched + frequencies * (1 - stretched)


def _yarn_dimension(num_rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """The dimension whose pair turns `num_rotations` times over the original context."""
    length = rope.parameters["original_length"]
    return head_dim * math.log(length / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
