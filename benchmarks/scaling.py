"""How times grow: a decode step with its batch and its context, a prompt with its length, the router with its streams.

The bounds beside them are of this machine, measured in the same run, and of what a step must at least read and compute.
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.bench import make_checkpoint
from benchmarks.bound import Roofline, StepCost, decode_cost, prefill_cost
from benchmarks.chart import Curve, Panel, panels
from benchmarks.machine import ROOT, commit, this_machine
from benchmarks.markers import rewrite
from benchmarks.plan import checkpoint_argument
from benchmarks.report import DATA, PAGE, sentence, write_json
from benchmarks.roofline import measure_roofline
from benchmarks.spread import Spread, short
from benchmarks.step import StepBench
from common.config import ModelSettings
from common.cores import num_cores
from common.model.config import ModelConfig

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
#: Of the batches, and of the sequences whose context grows.
SHORT_CONTEXT, FEW_SEQUENCES = 128, 4
#: A point is repeated until so much time has gone, but at least twice and no more often than asked.
POINT_S = 6.0


@dataclass(frozen=True, slots=True)
class Point:
    """Measured seconds, and the bound's."""

    at: int
    seconds: Spread
    bound_s: float


@dataclass(frozen=True, slots=True)
class StepCurve:
    """One curve, and how it is labelled."""

    title: str
    x_label: str
    points: Sequence[Point]

    def panel(self) -> Panel:
        measured = Curve("measured", [(point.at, 1e3 * point.seconds.median) for point in self.points])
        bound = Curve("bound", [(point.at, 1e3 * point.bound_s) for point in self.points], is_bound=True)
        return Panel(self.title, self.x_label, "ms", [measured, bound])

    def table(self) -> Iterator[str]:
        """Lines of Markdown."""
        yield f"| {self.x_label} | " + " | ".join(str(point.at) for point in self.points) + " |"
        yield "|---" * (len(self.points) + 1) + "|"
        yield "| bound, × of the time | " + " | ".join(_share(point) for point in self.points) + " |"
        yield "| ms | " + " | ".join(_ms(point.seconds) for point in self.points) + " |"


@dataclass(frozen=True, slots=True)
class RouterPoint:
    """Events per second with so many streams at once: through the router, and by a handler that only writes."""

    streams: int
    router_events_per_s: float
    raw_events_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    checkpoint_argument(parser)
    parser.add_argument("--num-threads", type=int, default=num_cores(), help="torch threads (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=20, help="steps per point, at most (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=PROMPTS[-1], help="longest prompt (default: %(default)s)")
    parser.add_argument("--without-router", action="store_true", help="forward passes only")
    parser.add_argument("--dry", action="store_true", help="print the result; leave the documentation as it is")
    arguments = parser.parse_args()
    make_checkpoint(arguments.model)
    roofline = measure_roofline(arguments.num_threads)
    bench = StepBench(arguments.model, max(PROMPTS[-1], FEW_SEQUENCES * CONTEXTS[-1]), arguments.num_threads)
    curves = list(step_curves(bench, roofline, arguments.repetitions, arguments.longest))
    router = [] if arguments.without_router else router_curve()
    generated = markdown(curves, router)
    print(generated)
    if not arguments.dry:
        write(curves, router, roofline, generated)


# --- measuring


def step_curves(bench: StepBench, roofline: Roofline, repetitions: int, longest: int) -> Iterator[StepCurve]:
    """Decode steps by batch and by context, prompts by length."""
    chunk_tokens: int = ModelSettings.model_fields["max_num_batched_tokens"].default

    def decode(num_sequences: int, context: int) -> Callable[[], float]:
        chunks = bench.decode_batch(num_sequences, context)
        return lambda: bench.seconds([chunks])

    def prefill(num_tokens: int) -> Callable[[], float]:
        steps = [[chunk] for chunk in bench.prompt(num_tokens, chunk_tokens)]
        return lambda: bench.seconds(steps)

    def curve(
        title: str, x_label: str, sizes: Sequence[int], step: Callable[[int], Callable[[], float]], cost: Cost
    ) -> StepCurve:
        points = []
        for size in sizes:
            seconds = _repeated(step(size), repetitions)
            points.append(Point(size, seconds, cost(bench.config, size).bound_s(roofline)))
            print(f"{title}, {x_label} {size}: {_ms(seconds)} ms", file=sys.stderr, flush=True)
        return StepCurve(title, x_label, points)

    def cost_of(num_sequences: int) -> Cost:
        return lambda config, context: decode_cost(config, num_sequences, context)

    yield curve(
        f"Decode step, {SHORT_CONTEXT} tokens of context",
        "sequences",
        BATCHES,
        lambda batch: decode(batch, SHORT_CONTEXT),
        lambda config, batch: decode_cost(config, batch, SHORT_CONTEXT),
    )
    yield curve("Decode step, 1 sequence", "tokens of context", CONTEXTS, partial(decode, 1), cost_of(1))
    title = f"Decode step, {FEW_SEQUENCES} sequences"
    yield curve(title, "tokens of context", CONTEXTS, partial(decode, FEW_SEQUENCES), cost_of(FEW_SEQUENCES))
    prompts = [length for length in PROMPTS if length <= longest]
    yield curve(f"Prompt, in chunks of {chunk_tokens}", "tokens", prompts, prefill, prefill_cost)


Cost = Callable[[ModelConfig, int], StepCost]


def _repeated(step: Callable[[], float], repetitions: int) -> Spread:
    """After one step that does not count."""
    begun = time.perf_counter()
    step()
    times: list[float] = []
    while len(times) < 2 or (len(times) < repetitions and time.perf_counter() - begun < POINT_S):
        times.append(step())
    return Spread.of(times)


def router_curve() -> list[RouterPoint]:
    """By the router's own benchmark."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "router.json"
        command = [sys.executable, "-m", "benchmarks.router", "--repetitions=1", "--curve", f"--json={result}"]
        subprocess.run(command, stdout=sys.stderr, check=True)
        points = json.loads(result.read_text())["curve"]
    return [RouterPoint(point["streams"], point["router_events_per_s"], point["raw_events_per_s"]) for point in points]


# --- telling


def markdown(curves: Sequence[StepCurve], router: Sequence[RouterPoint]) -> str:
    """Below the sentence about the machine."""
    lines = ["![Times and their bounds](benchmarks/scaling.svg)"]
    for curve in curves:
        lines += ["", f"### {curve.title}", "", *curve.table()]
    if router:
        lines += ["", "### Router: events per second by streams", "", *_router_table(router)]
    return "\n".join(lines)


def picture(curves: Sequence[StepCurve], router: Sequence[RouterPoint]) -> str:
    shown = [curve.panel() for curve in curves]
    if router:
        ours = Curve("router", [(point.streams, point.router_events_per_s) for point in router])
        raw = Curve("raw aiohttp writer", [(point.streams, point.raw_events_per_s) for point in router], is_bound=True)
        shown.append(Panel("Router", "streams at once", "events/s", [ours, raw]))
    return panels(shown)


def write(curves: Sequence[StepCurve], router: Sequence[RouterPoint], roofline: Roofline, generated: str) -> None:
    """The page's generated part, the picture and the JSON file."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": this_machine().to_json(),
        "roofline": asdict(roofline),
    }
    (ROOT / DATA).mkdir(parents=True, exist_ok=True)
    (ROOT / DATA / "scaling.svg").write_text(picture(curves, router))
    data = {"curves": [asdict(curve) for curve in curves], "router": [asdict(point) for point in router]}
    write_json(ROOT / DATA / "scaling.json", {**about, **data})
    bounds = (
        f"Memory was read at {roofline.read_bytes_per_s / 1e9:.3g} GB/s and bf16 matrices were multiplied at "
        f"{roofline.bf16_flop_per_s / 1e9:.0f} GFLOP/s at best, with every core; the bound is what a step must read "
        f"and compute at these rates. Times: median (lowest–highest)."
    )
    rewrite(ROOT / PAGE, "scaling", "\n\n".join([sentence(about), bounds, generated]))


def _router_table(router: Sequence[RouterPoint]) -> Iterator[str]:
    yield "| streams | " + " | ".join(str(point.streams) for point in router) + " |"
    yield "|---" * (len(router) + 1) + "|"
    ratios = (f"{point.router_events_per_s / point.raw_events_per_s:.2f}" for point in router)
    yield "| router, × of a raw aiohttp writer | " + " | ".join(ratios) + " |"
    yield "| events/s | " + " | ".join(short(point.router_events_per_s) for point in router) + " |"


def _share(point: Point) -> str:
    return f"{point.bound_s / point.seconds.median:.2f}"


def _ms(seconds: Spread) -> str:
    return str(Spread(1e3 * seconds.median, 1e3 * seconds.low, 1e3 * seconds.high))


if __name__ == "__main__":
    main()
