"""Values by bucket, cheap to add to: prometheus_client's own histogram takes a lock and walks its buckets each time."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Protocol

from prometheus_client.utils import floatToGoString

#: vLLM's buckets for times to a first token, in seconds, down to what a small model takes.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
#: vLLM's for times between tokens, and shorter ones.
ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
#: vLLM's for whole requests, and 0.1.
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
#: The same for the stages of a request, and finer below: some take milliseconds.
STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, *REQUEST_BUCKETS)
#: Tokens of prompts and answers: 1, 2 and 5 times powers of ten, as vLLM's.
TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
#: Tokens of one forward pass; vLLM's.
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Cells(Protocol):
    """A list of floats, or doubles in memory."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...
    def __iter__(self) -> Iterator[float]: ...


class BucketCounts:
    """One thread adds, any may read: what is being added in that moment may be seen in part."""

    __slots__ = ("_bounds", "_cells")

    def __init__(self, buckets: Sequence[float], cells: Cells | None = None) -> None:
        """`cells`: where to count, `num_cells` of them; None: from 0, in a list."""
        self._bounds = [*map(float, buckets), float("inf")]
        self._cells: Cells = [0.0] * self.num_cells(buckets) if cells is None else cells

    @staticmethod
    def num_cells(buckets: Sequence[float]) -> int:
        """One for each bound, one for the values above all, and last the sum of all values."""
        return len(buckets) + 2

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` in the first bucket whose bound is not below it, `times` times."""
        self._cells[bisect_left(self._bounds, value)] += times
        self._cells[-1] += value * times

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._cells[-1]

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """(bound, values up to it) as Prometheus writes them; the last one has all values."""
        counts = accumulate(islice(self._cells, len(self._bounds)))
        return list(zip(map(floatToGoString, self._bounds), counts, strict=True))
