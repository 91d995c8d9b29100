"""Median and range of repeated measurements, and of the ratios of two that were measured in turns."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}–{short(self.high)})"


def ratio(values: Sequence[float], baselines: Sequence[float]) -> Spread:
    """Of each value to the baseline that was measured in turn with it. Raises ValueError if one of them is missing."""
    return Spread.of([value / baseline for value, baseline in zip(values, baselines, strict=True)])


def short(value: float) -> str:
    """Three significant digits, whole above a hundred."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
