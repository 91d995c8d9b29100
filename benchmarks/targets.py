"""What was aimed at, and whether it was met: every line of the table, computed from the samples of the stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.bound import Roofline, decode_cost, prefill_cost
from benchmarks.spread import Spread
from benchmarks.stages import conversation, handoff_latency, memory, mixed, startup
from benchmarks.stages.names import (
    AGGREGATED,
    AGGREGATED_OFF,
    DISAGGREGATED,
    DISAGGREGATED_SERVER,
    PEER,
    PEER_SERVER,
)
from benchmarks.stages.serving import CONCURRENCIES, PROMPTS, decode, ttft
from benchmarks.table import Samples
from common.model.config import ModelConfig

#: What the handoff's rate is compared with, as `benchmarks.handoff` calls it.
RAW = "pyzmq, copy=False"
#: Middle of a decoding request of the serving stage: its prompt and half of its output.
DECODE_CONTEXT = 96


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that a run measured; stages that it left out have no samples."""

    stages: Mapping[str, Samples]
    roofline: Roofline | None
    config: ModelConfig | None

    def of(self, stage: str) -> Samples:
        return self.stages.get(stage) or Samples()


Measure = Callable[[Results], Spread | None]


@dataclass(frozen=True, slots=True)
class Target:
    """One line. `measure` and `bound` give what is compared with `limit`, in `unit`; None: nothing to tell."""

    name: str
    limit: float
    at_most: bool
    unit: str
    measure: Measure
    bound: Callable[[Results], float | None]

    def is_met(self, measured: Spread) -> bool:
        """By the median."""
        return measured.median <= self.limit if self.at_most else measured.median >= self.limit

    def row(self, results: Results) -> str:
        """A line of Markdown."""
        measured, bound = self.measure(results), self.bound(results)
        aim = f"{'≤' if self.at_most else '≥'} {_with_unit(f'{self.limit:g}', self.unit)}"
        best = "–" if bound is None else _with_unit(f"{bound:.2g}", self.unit)
        found = "not measured" if measured is None else _with_unit(_fine(measured), self.unit)
        verdict = "" if measured is None else ("met" if self.is_met(measured) else "**missed**")
        return f"| {self.name} | {aim} | {best} | {found} | {verdict} |"


def table(results: Results, targets: Iterable[Target]) -> Iterator[str]:
    """Lines of Markdown; a measured value is its median (lowest–highest) over the rounds."""
    yield "| | target | bound | measured | |"
    yield "|---|---|---|---|---|"
    for target in targets:
        yield target.row(results)


def _fine(spread: Spread) -> str:
    """With as many digits as a target of 1.01 needs."""
    digits = 3 if 0.9 <= spread.median < 1.1 else 2
    if spread.median >= 10:
        return str(spread)
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}–{spread.high:.{digits}f})"


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit else text


# --- what is measured


def _ratio(stage: str, condition: str, baseline: str, quantity: str) -> Measure:
    return lambda results: results.of(stage).ratio(condition, baseline, quantity)


def _value(stage: str, condition: str, quantity: str) -> Measure:
    return lambda results: results.of(stage).spread(condition, quantity)


def worst_ratio(samples: Samples, condition: str, baseline: str, *, named: str = "") -> Spread | None:
    """How many times as slow as `baseline` a condition is at worst, over quantities with `named` in their names."""
    quantities = [quantity for quantity in samples.quantities(condition) if named in quantity.name]
    ratios = [samples.speed_ratio(baseline, condition, quantity) for quantity in quantities]
    return max(ratios, key=lambda each: each.median, default=None)


def _worst_memory(results: Results) -> Spread | None:
    samples = results.of("memory")
    found = [samples.spread(condition, memory.BEYOND.name) for condition in samples.conditions]
    return max((each for each in found if each), key=lambda each: each.median, default=None)


def _handoff_latency(results: Results) -> Spread | None:
    """Up to the running batch if the cluster tells that, else up to the acknowledgement, which comes later."""
    samples = results.of("handoff latency")
    found = (samples.spread(DISAGGREGATED, name) for name in reversed(handoff_latency.METRICS))
    return next((each for each in found if each), None)


def _handoff_throughput(transport: str) -> Measure:
    def measure(results: Results) -> Spread | None:
        samples = results.of("handoff")
        names = [quantity.name for quantity in samples.quantities("handoff")]
        ratios = [samples.ratio("handoff", RAW, name) for name in names if name.endswith(f", {transport}")]
        return min((each for each in ratios if each), key=lambda each: each.median, default=None)

    return measure


def _router_cost(named: str) -> Measure:
    return lambda results: worst_ratio(results.of("router"), "router", "raw aiohttp writer", named=named)


def _cost_of_exactness(condition: str) -> Measure:
    return lambda results: worst_ratio(results.of("exactness"), condition, "inexact")


# --- bounds


def _no_bound(results: Results) -> float | None:
    return None


def _always(value: float) -> Callable[[Results], float | None]:
    return lambda results: value


def _ttft_bound(num_tokens: int) -> Callable[[Results], float | None]:
    """The machine's bound to the peer's time."""

    def bound(results: Results) -> float | None:
        theirs = results.of("serving").spread(PEER, ttft(num_tokens).name)
        if theirs is None or results.roofline is None or results.config is None:
            return None
        return 1e3 * prefill_cost(results.config, num_tokens).bound_s(results.roofline) / theirs.median

    return bound


def _decode_bound(concurrency: int) -> Callable[[Results], float | None]:
    def bound(results: Results) -> float | None:
        theirs = results.of("serving").spread(PEER, decode(concurrency).name)
        if theirs is None or results.roofline is None or results.config is None:
            return None
        step_s = decode_cost(results.config, concurrency, DECODE_CONTEXT).bound_s(results.roofline)
        return concurrency / step_s / theirs.median

    return bound


# --- the lines


def _serving_targets() -> Iterator[Target]:
    for num_tokens in PROMPTS:
        name = ttft(num_tokens).name
        measure = _ratio("serving", AGGREGATED, PEER, name)
        yield Target(f"{name} to vLLM's, aggregated", 0.65, True, "×", measure, _ttft_bound(num_tokens))
    for concurrency in CONCURRENCIES:
        name = decode(concurrency).name
        measure = _ratio("serving", AGGREGATED, PEER, name)
        yield Target(f"{name} to vLLM's, aggregated", 1.6, False, "×", measure, _decode_bound(concurrency))


def _rows_targets() -> Iterator[Target]:
    for concurrency in CONCURRENCIES:
        name = decode(concurrency).name
        measure = _ratio("rows", AGGREGATED, AGGREGATED_OFF, name)
        yield Target(f"rows on to rows off, {name}", 0.99, False, "×", measure, _always(1))
    for num_tokens in PROMPTS:
        name = ttft(num_tokens).name
        measure = _ratio("rows", AGGREGATED, AGGREGATED_OFF, name)
        yield Target(f"rows on to rows off, {name}", 1.01, True, "×", measure, _always(1))


def _mixed_targets() -> Iterator[Target]:
    gap, rate = mixed.GAP_P99_RATIO, mixed.RATE_RATIO
    measure = _value("mixed", DISAGGREGATED, gap.name)
    yield Target("mixed load, 1P+1D: gap p99 to quiet", 1.3, True, "×", measure, _always(1))
    measure = _value("mixed", DISAGGREGATED, rate.name)
    yield Target("mixed load, 1P+1D: background tok/s to quiet", 0.9, False, "×", measure, _always(1))


def _part_targets(num_turns: int) -> Iterator[Target]:
    for name, condition in {"kernels as served": "exact", "torch's exact kernels": "torch"}.items():
        line = f"{name} to torch's fastest inexact ones, forward pass, worst case"
        yield Target(line, 1.03, True, "×", _cost_of_exactness(condition), _always(1))
    yield Target("end of prefill to first decode step, 512 tokens", 5, True, "ms", _handoff_latency, _no_bound)
    for transport in ("ipc", "tcp"):
        measure = _handoff_throughput(transport)
        yield Target(f"handoff rate to raw pyzmq, {transport}", 0.7, False, "×", measure, _always(1))
    for pace, named in {"events at a decoder's pace": "every", "as fast as possible": "as fast as"}.items():
        name = f"router CPU per event to a raw aiohttp write, {pace}, worst case"
        yield Target(name, 2, True, "×", _router_cost(named), _always(1))
    turns = f"{num_turns} turns"
    measure = _ratio("conversation", conversation.NEW_ROWS, conversation.ROWS_OFF, turns)
    yield Target(f"{turns}, known prefix left out, to no rows", 1.02, True, "×", measure, _always(1))
    yield Target("RSS of a worker beyond weights and KV pool", 400, True, "MiB", _worst_memory, _no_bound)
    started = _ratio("startup", DISAGGREGATED_SERVER, PEER_SERVER, startup.START.name)
    yield Target("start until it serves to vLLM's, 1P+1D", 0.5, True, "×", started, _no_bound)


def all_targets(num_turns: int) -> list[Target]:
    """In the order of the table. `num_turns`: of the conversation stage."""
    return [*_serving_targets(), *_rows_targets(), *_mixed_targets(), *_part_targets(num_turns)]
