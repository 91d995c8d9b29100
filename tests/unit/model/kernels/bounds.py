"""Recomputation in double precision that carries along how far fp32 sums and roundings may be off.

Every bound is the standard one: a sum of n products in precision u is off by at most n u times the sum of the
magnitudes, whatever the order (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). A factor of two
covers second-order terms and an exponential of a unit or two in the last place.

Shape suffixes as in `common.model.kernels.interface`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Doubles = npt.NDArray[np.float64]

#: Unit roundoff: half the distance from 1 to the next number.
FP32 = 2.0**-24
ROUNDOFF = {torch.float32: FP32, torch.bfloat16: 2.0**-8}

#: Of silu, and of x · sigmoid(αx): what its slope never exceeds.
_STEEPEST_SILU = 1.1


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, the same for the same arguments."""
    random = np.random.default_rng([seed, *shape])
    return torch.from_numpy(random.standard_normal(shape, np.float32)).to(dtype)


def doubles(tensor: torch.Tensor) -> Doubles:
    values: Doubles = tensor.double().numpy()
    return values


@dataclass(frozen=True)
class Bounded:
    """Numbers, and what a computation in fp32 may be off from each."""

    value: Doubles
    error: Doubles

    @classmethod
    def exact(cls, tensor: torch.Tensor) -> "Bounded":
        value = doubles(tensor)
        return cls(value, np.zeros_like(value))

    def times(self, weight_OI: torch.Tensor) -> "Bounded":
        """`self @ weight.T`, summed in fp32."""
        weight, num_inputs = doubles(weight_OI), weight_OI.shape[1]
        magnitude = (np.abs(self.value) + self.error) @ np.abs(weight).T
        carried = self.error @ np.abs(weight).T
        return Bounded(self.value @ weight.T, carried + 2 * num_inputs * FP32 * magnitude)

    def plus(self, other: "Bounded") -> "Bounded":
        value = self.value + other.value
        return Bounded(value, self.error + other.error + 2 * FP32 * np.abs(value))

    def scaled(self, factor: Doubles) -> "Bounded":
        """By numbers that the computation has exactly."""
        return Bounded(self.value * factor, self.error * np.abs(factor) + 2 * FP32 * np.abs(self.value * factor))

    def rounded(self, dtype: torch.dtype) -> "Bounded":
        return Bounded(self.value, self.error + ROUNDOFF[dtype] * (np.abs(self.value) + self.error))

    def linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> "Bounded":
        """A product as the kernels store it: rounded, the bias added, rounded again."""
        product = self.times(weight_OI).rounded(weight_OI.dtype)
        return product if bias_O is None else product.plus(Bounded.exact(bias_O)).rounded(weight_OI.dtype)

    def clipped(self, low: float, high: float) -> "Bounded":
        return Bounded(np.clip(self.value, low, high), self.error)

    def check(self, actual: torch.Tensor) -> None:
        excess = np.abs(doubles(actual) - self.value) - self.error
        assert actual.shape == self.value.shape
        # Not "<= 0" alone: NaN must fail, too.
        worst = np.unravel_index(np.argmax(np.nan_to_num(excess, nan=np.inf)), excess.shape)
        assert np.all(excess <= 0), (
            f"at {worst}: {doubles(actual)[worst]} where {self.value[worst]} ± {self.error[worst]} was expected"
        )


def gated(gate: Bounded, up: Bounded, alpha: float = 1.0) -> Bounded:
    """`gate · sigmoid(alpha gate) · up` in fp32."""
    silu = gate.value / (1 + np.exp(-alpha * gate.value))
    value = silu * up.value
    carried = _STEEPEST_SILU * gate.error * (np.abs(up.value) + up.error) + np.abs(silu) * up.error
    return Bounded(value, carried + 16 * FP32 * np.abs(value))
