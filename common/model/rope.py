"""Rotary position embedding: frequencies for every supported kind of scaling, and a table over the positions in use.

Shape suffixes: P positions of the table, T tokens, N heads, D head size, R rotated pairs of a head (2 R <= D).
"""

import math
from functools import cached_property

import numpy as np
import torch
import xxhash

from common.model.config import RopeConfig
from common.model.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, YarnScaling

#: Cosine and sine of some positions, each [T, 1, R].
CosSin = tuple[torch.Tensor, torch.Tensor]

#: Positions computed at a time: the double-precision temporaries stay at a few megabytes, however long the table is.
_SLAB = 8192


class RotaryTable:
    """Cosine and sine of positions 0 to `num_positions` - 1, fp32 [P, R], computed once: a look-up is exact, a
    computation in a batch may differ in the last bit between the vector loop and its scalar tail.

    Kinds whose frequencies depend on the length of the sequence get those of a sequence of `num_positions`.
    """

    def __init__(self, rope: RopeConfig, rotary_dim: int, device: torch.device, num_positions: int) -> None:
        frequencies_R = rotary_frequencies(rope, rotary_dim, num_positions).numpy()
        cos_PR, sin_PR = np.empty((2, num_positions, len(frequencies_R)), np.float32)
        for start in range(0, num_positions, _SLAB):
            slab = slice(start, min(start + _SLAB, num_positions))
            # The fp32 angle is what transformers uses; its cosine is taken in double precision and rounded once.
            angles_PR = np.arange(slab.start, slab.stop).astype(np.float32)[:, None] * frequencies_R
            cos_PR[slab] = np.cos(angles_PR, dtype=np.float64) * rope.attention_factor
            sin_PR[slab] = np.sin(angles_PR, dtype=np.float64) * rope.attention_factor
        self.cos_PR, self.sin_PR = torch.from_numpy(cos_PR).to(device), torch.from_numpy(sin_PR).to(device)

    def look_up(self, positions_T: torch.Tensor) -> CosSin:
        """Cosine and sine of the positions, each [T, 1, R], ready to broadcast over heads."""
        return self.cos_PR[positions_T].unsqueeze(1), self.sin_PR[positions_T].unsqueeze(1)


class Angles:
    """The positions of one batch: looked up once, by whoever does not read the table itself."""

    def __init__(self, table: RotaryTable, positions_T: torch.Tensor) -> None:
        self.table = table
        self.positions_T = positions_T

    @cached_property
    def cos_sin(self) -> CosSin:
        """Each [T, 1, R]."""
        return self.table.look_up(self.positions_T)


def rotate(x_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + R) of every head; dimensions from 2 R on pass unchanged."""
    num_pairs = cos_T1R.shape[-1]
    first, second, rest = x_TND.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    return torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R, rest), dim=-1)


def interleaved_rows(num_dims: int) -> torch.Tensor:
    """Which row goes where, int64 [num_dims], in the projection of a checkpoint whose rotated pairs are (2 i, 2 i + 1).

    With the rows of queries and of keys (and their biases) taken in this order, `rotate` turns the pairs that were
    meant. Both move alike, so their products stay what they were.
    """
    return torch.arange(num_dims).view(-1, 2).T.flatten()


def rotary_frequencies(rope: RopeConfig, rotary_dim: int, num_positions: int) -> torch.Tensor:
    """Angle per position of each pair, fp32 [R], where `rotary_dim` = 2 R dimensions of a head are rotated and no
    sequence is longer than `num_positions`. The order of operations is that of transformers, to the last bit.
    """
    exponents_R = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    match rope.scaling:
        case DynamicScaling():
            return 1.0 / _dynamic_theta(rope.theta, rope.scaling, rotary_dim, num_positions) ** exponents_R
        case LongScaling(original_length, short, long):
            divisors_R = torch.tensor(long if num_positions > original_length else short, dtype=torch.float32)
            return 1.0 / (divisors_R * rope.theta**exponents_R)
        case LinearScaling(factor):
            return 1.0 / rope.theta**exponents_R / factor
        case Llama3Scaling():
            return _llama3(1.0 / rope.theta**exponents_R, rope.scaling)
        case YarnScaling():
            return _yarn(rope.theta**exponents_R, rope.theta, rope.scaling)
        case None:
            return 1.0 / rope.theta**exponents_R


def rotary_digest(rope: RopeConfig, rotary_dim: int, num_positions: int) -> str:
    """Equal on two workers only if they rotate alike: `num_positions` counts where the frequencies depend on it."""
    digest = xxhash.xxh3_64(rotary_frequencies(rope, rotary_dim, num_positions).numpy().tobytes())
    digest.update(np.float64(rope.attention_factor).tobytes())
    return digest.hexdigest()


def _dynamic_theta(theta: float, scaling: DynamicScaling, rotary_dim: int, num_positions: int) -> float:
    """NTK-aware scaling: the base at which the longest wavelength grows as much as the context does."""
    length = max(num_positions, scaling.original_length)
    stretch = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
    return float(theta * stretch ** (rotary_dim / (rotary_dim - 2)))


def _llama3(frequencies_R: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths_R = 2 * math.pi / frequencies_R
    kept_R = ((scaling.original_length / wavelengths_R - low) / (high - low)).clamp(0, 1)
    return (1 - kept_R) * frequencies_R / scaling.factor + kept_R * frequencies_R


def _yarn(powers_R: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    rotary_dim = 2 * len(powers_R)
    low = _turning_pair(scaling.beta_fast, theta, scaling.original_length, rotary_dim)
    high = _turning_pair(scaling.beta_slow, theta, scaling.original_length, rotary_dim)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp_R = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept_R = 1 - ramp_R
    return 1.0 / (scaling.factor * powers_R) * (1 - kept_R) + 1.0 / powers_R * kept_R


def _turning_pair(num_turns: float, theta: float, length: float, rotary_dim: int) -> float:
    """The pair, between whole ones, that turns `num_turns` times over `length` positions."""
    return rotary_dim * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))
