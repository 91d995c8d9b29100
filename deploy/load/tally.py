"""What a load test has come to: counts and times, which add up over processes, and the summary."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.load.histogram import Histogram
from deploy.load.stream import Arrival

PERCENTILES = (50, 90, 95, 99, 100)

_COUNTS = ("num_finished", "num_cut_off", "num_prompt_tokens", "num_tokens", "num_shortened")
_TIMES = {"ttft": "time to first token", "itl": "between tokens", "e2e": "whole request"}


@dataclass
class Tally:
    """Of one process, or of all."""

    num_finished: int = 0
    #: Streams that the end of the test cut off.
    num_cut_off: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    #: Requests of a trace that were longer than the context.
    num_shortened: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)

    def arrived(self, arrival: Arrival) -> None:
        """Tokens that came together share the time since those before."""
        self.num_tokens += arrival.num_tokens
        if arrival.is_first:
            self.ttft.add(arrival.after_s)
        else:
            self.itl.add(arrival.after_s / arrival.num_tokens, arrival.num_tokens)

    def finished(self, num_prompt_tokens: int, seconds: float) -> None:
        self.num_finished += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.e2e.add(seconds)

    def failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def exit_code(self) -> int:
        """1 if anything failed, or nothing was asked."""
        return 1 if self.num_failed or not self.num_finished else 0

    def told(self) -> dict[str, Any]:
        """What was counted, as JSON, for another process."""
        times = {name: getattr(self, name).counts for name in _TIMES}
        return {name: getattr(self, name) for name in _COUNTS} | {"failures": self.failures} | times

    def merge(self, told: Mapping[str, Any]) -> None:
        """Adds what `told` says elsewhere."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + told[name])
        for reason, number in told["failures"].items():
            self.failures[reason] = self.failures.get(reason, 0) + number
        for name in _TIMES:
            # A channel may have made texts of the numbers.
            getattr(self, name).merge({int(bucket): number for bucket, number in told[name].items()})

    def summary(self, seconds: float) -> Iterator[str]:
        """Line by line; `seconds`: how long the test took."""
        heads = "".join(f"{'max' if p == 100 else f'p{p}':>12}" for p in PERCENTILES)
        yield f"{'':<22}{heads}"
        for name, title in _TIMES.items():
            histogram: Histogram = getattr(self, name)
            cells = (f"{1000 * histogram.percentile(p):.1f} ms" if histogram.total else "-" for p in PERCENTILES)
            yield f"{title:<22}{''.join(f'{cell:>12}' for cell in cells)}"
        rate = 1 / max(seconds, 1e-9)
        yield (
            f"{self.num_finished} requests in {seconds:.1f} s: {self.num_finished * rate:.2f} requests/s, "
            f"{self.num_prompt_tokens * rate:.1f} prompt and {self.num_tokens * rate:.1f} generated tokens/s"
        )
        if self.num_cut_off:
            yield f"{self.num_cut_off} streams were cut off by the end of the test"
        if self.num_shortened:
            yield f"{self.num_shortened} requests of the trace were cut to the context"
        for reason, number in sorted(self.failures.items(), key=lambda item: -item[1]):
            yield f"failed, {number} times: {reason}"
        yield f"load: {self.num_finished + self.num_failed} requests, {self.num_failed} failures"
