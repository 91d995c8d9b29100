"""Percentiles of many durations in little memory; those of several processes add up."""

import math
from collections.abc import Mapping

#: Neighbouring buckets differ by so much: the resolution of every percentile.
_GROWTH = 1.01
#: What is shorter counts as this long.
_SHORTEST_S = 1e-6


class Histogram:
    """Counts durations in buckets whose widths grow with them."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def add(self, seconds: float, number: int = 1) -> None:
        """`number` times a duration."""
        bucket = math.ceil(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S, _GROWTH))
        self.counts[bucket] = self.counts.get(bucket, 0) + number

    def merge(self, counts: Mapping[int, int]) -> None:
        """Adds what another process has counted."""
        for bucket, number in counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + number

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def percentile(self, percent: float) -> float:
        """The duration in seconds that so many percent do not exceed, up to 1 % too long; 0 of nothing."""
        wanted, seen = percent / 100 * self.total, 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return float(_SHORTEST_S * _GROWTH**bucket)
        return 0.0
