"""Decoding streams while long prompts arrive: what disaggregation is for."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from benchmarks.load import DECODE_PROMPT_TOKENS, LoadGenerator
from benchmarks.stages.conditions import Condition, Servers
from benchmarks.stages.stage import balanced
from benchmarks.table import Quantity, Samples

NUM_STREAMS = 4
#: Of a stream of the background; it is begun anew when it ends.
STREAM_TOKENS = 200
LONG_PROMPT_TOKENS = 2048
LONG_OUTPUT_TOKENS = 8
EVERY_S = 4.0

GAP_P99_RATIO = Quantity("gap p99, mixed to quiet", "×", higher_is_better=False)
RATE_RATIO = Quantity("background tok/s, mixed to quiet", "×", higher_is_better=True)


@dataclass(slots=True)
class Phase:
    """What was seen meanwhile."""

    #: Between events of one stream of the background.
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    #: Of the long prompts.
    ttfts_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def add_to(self, samples: Samples, condition: str, label: str) -> None:
        gaps_ms = sorted(1e3 * gap for gap in self.gaps_s)
        values = {"p50": quantile(gaps_ms, 0.5), "p99": quantile(gaps_ms, 0.99), "max": gaps_ms[-1]}
        for name, value in values.items():
            samples.add(condition, Quantity(f"{label}: gap {name}", "ms", higher_is_better=False), value)
        samples.add(condition, Quantity(f"{label}: background", "tok/s", higher_is_better=True), self.rate)
        if self.ttfts_s:
            ttft = Quantity(f"{label}: TTFT of the long prompts", "ms", higher_is_better=False)
            samples.add(condition, ttft, 1e3 * statistics.median(self.ttfts_s))

    @property
    def gap_p99_s(self) -> float:
        return quantile(sorted(self.gaps_s), 0.99)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.wall_s


class MixedStage:
    """Under each condition a quiet phase, and one with long prompts.

    Args:
        seconds: of a phase.
    """

    name = "mixed"

    def __init__(self, servers: Servers, conditions: Sequence[Condition], num_rounds: int, seconds: float) -> None:
        self.num_rounds = num_rounds
        self._servers = servers
        self._conditions = conditions
        self._seconds = seconds

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        loads = {each.name: await self._servers.load(each) for each in self._conditions}
        samples = Samples()
        for condition, load in balanced(list(loads.items()), number):
            quiet = await run_phase(load, self._seconds, with_long=False)
            mixed = await run_phase(load, self._seconds, with_long=True)
            quiet.add_to(samples, condition, "quiet")
            mixed.add_to(samples, condition, "mixed")
            samples.add(condition, GAP_P99_RATIO, mixed.gap_p99_s / quiet.gap_p99_s)
            samples.add(condition, RATE_RATIO, mixed.rate / quiet.rate)
        return samples


async def run_phase(load: LoadGenerator, seconds: float, *, with_long: bool) -> Phase:
    """The background for that long; long prompts in the middle of each interval of `EVERY_S`."""
    phase, stop = Phase(), asyncio.Event()
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(_background(load, phase, stop))
        due = EVERY_S / 2
        while with_long and due < seconds:
            await asyncio.sleep(begun + due - time.perf_counter())
            group.create_task(_long_prompt(load, phase))
            due += EVERY_S
        await asyncio.sleep(begun + seconds - time.perf_counter())
        phase.wall_s = time.perf_counter() - begun
        stop.set()
    return phase


async def _background(load: LoadGenerator, phase: Phase, stop: asyncio.Event) -> None:
    while not stop.is_set():
        last = None
        async with aclosing(load.arrivals(DECODE_PROMPT_TOKENS, STREAM_TOKENS)) as arrivals:
            async for now, count in arrivals:
                if stop.is_set():
                    break
                if last is not None:
                    phase.gaps_s.append(now - last)
                last = now
                phase.num_tokens += count


async def _long_prompt(load: LoadGenerator, phase: Phase) -> None:
    arrivals = await load.request(LONG_PROMPT_TOKENS, LONG_OUTPUT_TOKENS)
    phase.ttfts_s.append(arrivals.tokens[0] - arrivals.sent)


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that so large a share of ascending values lies below."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
