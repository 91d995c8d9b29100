"""What the router costs: CPU time per streamed event, rows included, beside an aiohttp handler that only writes.

The router runs as a process of its own in front of a decode worker without a model (`stream_source`). The raw writer
(`raw_sse`) sends events of the same bytes, at the same pace, to the same reader. Both are measured in turns.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
import psutil

from benchmarks.cpu_time import process_cpu_s
from benchmarks.server import free_port, serving
from benchmarks.stream_client import read_streams

#: Streams of the scaling curve.
CURVE = (1, 2, 5, 10, 20, 50, 100, 200, 500)
#: Events per stream of the curve, so that every point takes about as long.
CURVE_EVENTS = 20_000


@dataclass(frozen=True, slots=True)
class Shape:
    """How a load streams. `interval_ms`: between the events of a stream; 0 is as fast as they are taken."""

    name: str
    num_streams: int
    event_tokens: int
    interval_ms: int
    num_events: int


SHAPES = (
    Shape("16 streams, 1 token per event, as fast as possible", 16, 1, 0, 500),
    Shape("16 streams, 16 tokens per event, as fast as possible", 16, 16, 0, 300),
    Shape("64 streams, 1 token per event, every 100 ms", 64, 1, 100, 60),
    Shape("64 streams, 16 tokens per event, every 200 ms", 64, 16, 200, 30),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one run of one server."""

    cpu_us_per_event: float
    events_per_s: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement and the processes whose CPU time counts."""

    url: str
    pids: Sequence[int]

    @classmethod
    def at(cls, url: str, pid: int) -> "Server":
        """The process that was started and all that it has started; several of them may listen there."""
        return cls(url, [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))])

    def cpu_s(self) -> float:
        """Raises OSError if one of them has ended."""
        return sum(process_cpu_s(pid) for pid in self.pids)

    async def measure(self, path: str, body: dict[str, object], num_streams: int) -> Cost:
        before = self.cpu_s()
        streams = await read_streams(self.url + path, body, num_streams)
        cpu_s = self.cpu_s() - before
        num_events = sum(stream.num_events for stream in streams)
        wall_s = max(stream.last for stream in streams) - min(stream.first for stream in streams)
        return Cost(1e6 * cpu_s / num_events, num_events / wall_s)


@dataclass(frozen=True, slots=True)
class Bench:
    """Both servers."""

    router: Server
    raw: Server

    async def of_router(self, shape: Shape) -> Cost:
        return await self.router.measure("/inference/v1/generate", _request(shape), shape.num_streams)

    async def of_raw(self, shape: Shape, event: str) -> Cost:
        body = {"event": event, "num_events": shape.num_events + 1, "interval_ms": shape.interval_ms}
        return await self.raw.measure("/stream", body, shape.num_streams)

    async def event(self, shape: Shape) -> str:
        """An event in the middle of such a stream."""
        short = Shape(shape.name, 1, shape.event_tokens, 0, 3)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.router.url}/inference/v1/generate", json=_request(short)) as response,
        ):
            return (await response.text()).split("\n\n")[1] + "\n\n"


def _request(shape: Shape) -> dict[str, object]:
    prompt = [shape.event_tokens, shape.interval_ms]
    sampling = {
        "max_tokens": shape.num_events * shape.event_tokens,
        "ignore_eos": True,
        "routed_experts_prompt_start": len(prompt),
    }
    return {"token_ids": prompt, "stream": True, "sampling_params": sampling}


@asynccontextmanager
async def benches(router_flags: str) -> AsyncIterator[Bench]:
    """Starts the source, the router in front of it, and the raw writer."""
    python = sys.executable
    router = [python, "-m", "router", "--port", "{port}"]
    async with (
        serving([python, "-m", "benchmarks.raw_sse", "--port", "{port}"]) as raw,
        running_source() as source,
        serving([*router, "--decode", source, "--log-level", "warning", *shlex.split(router_flags)]) as routing,
    ):
        yield Bench(Server.at(routing.url, routing.pid), Server.at(raw.url, raw.pid))


@asynccontextmanager
async def running_source() -> AsyncIterator[str]:
    """HOST:PORT of the worker without a model; the router waits until it answers."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.stream_source", "--port", str(port), stdout=sys.stderr
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def compare(bench: Bench, shape: Shape, repetitions: int) -> dict[str, object]:
    """Router and raw writer in turns."""
    event = await bench.event(shape)
    router: list[Cost] = []
    raw: list[Cost] = []
    await bench.of_router(shape)
    await bench.of_raw(shape, event)
    for _ in range(repetitions):
        router.append(await bench.of_router(shape))
        raw.append(await bench.of_raw(shape, event))
    ratios = sorted(a.cpu_us_per_event / b.cpu_us_per_event for a, b in zip(router, raw, strict=True))
    return {
        "shape": asdict(shape),
        "event_bytes": len(event),
        "router": [asdict(cost) for cost in router],
        "raw": [asdict(cost) for cost in raw],
        "ratio": {"median": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]},
    }


def _row(result: dict[str, object]) -> str:
    shape, ratio = result["shape"], result["ratio"]
    assert isinstance(shape, dict)
    assert isinstance(ratio, dict)
    cells = [shape["name"], str(result["event_bytes"])]
    for name in ("router", "raw"):
        costs = result[name]
        assert isinstance(costs, list)
        cells.append(f"{statistics.median(cost['cpu_us_per_event'] for cost in costs):.0f}")
    cells.append(f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})")
    return "| " + " | ".join(cells) + " |"


async def curve(bench: Bench) -> list[dict[str, float]]:
    """Events per second against concurrent streams, as fast as they are taken, one token per event."""
    points: list[dict[str, float]] = []
    event = await bench.event(SHAPES[0])
    for num_streams in CURVE:
        shape = Shape("curve", num_streams, 1, 0, max(20, CURVE_EVENTS // num_streams))
        router, raw = await bench.of_router(shape), await bench.of_raw(shape, event)
        points.append(
            {
                "streams": num_streams,
                "router_events_per_s": router.events_per_s,
                "router_cpu_us_per_event": router.cpu_us_per_event,
                "raw_events_per_s": raw.events_per_s,
                "raw_cpu_us_per_event": raw.cpu_us_per_event,
            }
        )
        print(json.dumps(points[-1]), file=sys.stderr)
    return points


async def _run(options: argparse.Namespace) -> None:
    report: dict[str, object] = {}
    async with benches(options.router_flags) as bench:
        print("| | bytes per event | router, µs | raw, µs | router / raw |\n|---|---|---|---|---|")
        results = []
        for shape in SHAPES:
            longer = replace(shape, num_events=shape.num_events * options.longer)
            results.append(await compare(bench, longer, options.repetitions))
            print(_row(results[-1]), flush=True)
        report["cost"] = results
        if options.curve:
            report["curve"] = await curve(bench)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--longer", type=int, default=1, help="events per stream, times this (default: %(default)s)")
    parser.add_argument("--router-flags", default="", help="more flags for the router")
    parser.add_argument("--curve", action="store_true", help="also events/s against concurrent streams")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
