"""Rotary position embedding: frequencies for every supported kind of scaling, and a table over all positions.

Shape suffixes: P positions of the table, T tokens, N heads, D head size, R = D / 2 rotated pairs.
"""

import math

import numpy as np
import torch

from common.model.config import ModelConfig, RopeConfig


class RotaryTable:
    """Cosine and sine of every position, fp32 [P, R], computed once: a look-up is exact, a computation in a batch may
    differ in the last bit between the vector loop and its scalar tail.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        frequencies = rotary_frequencies(config.rope, config.head_dim).numpy()
        # The fp32 angle is what transformers uses; its cosine is taken in double precision and rounded once.
        angles = np.arange(config.max_position_embeddings, dtype=np.float32)[:, None] * frequencies
        factor = config.rope.parameters.get("attention_factor", 1.0)
        self._cos_PR = _rounded(np.cos(angles, dtype=np.float64) * factor, device)
        self._sin_PR = _rounded(np.sin(angles, dtype=np.float64) * factor, device)

    def look_up(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the positions, each [T, 1, R], ready to broadcast over heads."""
        return self._cos_PR[positions_T].unsqueeze(1), self._sin_PR[positions_T].unsqueeze(1)


def _rounded(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(device)


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
