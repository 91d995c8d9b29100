"""Where the time goes: a live cluster under load, sampled by py-spy, and forward passes under torch's profiler.

Writes into one folder, per worker and for the router `NAME.folded` (for speedscope) and `NAME.svg` (a flame graph), and
per kind of step `NAME.json` (a trace, for Perfetto) and `NAME.txt` (operators by their own time). How to read them:
docs/profiling.md.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sysconfig
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.bench import make_checkpoint
from benchmarks.load import LoadGenerator
from benchmarks.plan import DIRECTORY, checkpoint_argument
from benchmarks.server import stop_servers_on_sigterm
from benchmarks.stacks import shares
from benchmarks.stages.conditions import Condition, Servers, aggregated, disaggregated
from benchmarks.step import StepBench
from common.cores import num_cores
from common.model.batch import Chunk

#: The engine's thread in every worker.
ENGINE_THREAD = "engine"
#: That of this process.
MAIN_THREAD = "MainThread"
#: Modules that processes of a cluster run; the last one in each of several router processes.
SERVICES = ("prefill_worker", "decode_worker", "router", "router.processes")
#: Prompt and output of the load: mostly decoding.
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 256
NUM_OPERATORS = 25
STEPS_PER_TRACE = 10
CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiling", description=__doc__)
    checkpoint_argument(parser)
    parser.add_argument("--out", type=Path, default=DIRECTORY / "profile", help="folder (default: %(default)s)")
    parser.add_argument("--mode", choices=("aggregated", "disaggregated"), default="aggregated", help="of the cluster")
    parser.add_argument("--streams", type=int, default=4, help="requests at once (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=15, help="per process and form (default: %(default)s)")
    parser.add_argument("--without-cluster", action="store_true", help="forward passes only")
    arguments = parser.parse_args()
    stop_servers_on_sigterm()
    arguments.out.mkdir(parents=True, exist_ok=True)
    make_checkpoint(arguments.model)
    if not arguments.without_cluster:
        asyncio.run(profile_cluster(arguments))
    bench = StepBench(arguments.model, 4096, num_cores())
    asyncio.run(profile_steps(bench, arguments.streams, arguments.out, arguments.seconds))
    print(f"written to {arguments.out}")


# --- a live cluster


async def profile_cluster(arguments: argparse.Namespace) -> None:
    """Samples each process in turn while requests are decoded.

    Raises:
        RuntimeError: the cluster does not start, or py-spy cannot look into it.
    """
    spec = {"aggregated": aggregated, "disaggregated": disaggregated}[arguments.mode](arguments.model)
    async with Servers(arguments.out) as servers:
        load = await servers.load(Condition(spec.name, spec))
        async with _under_load(load, arguments.streams):
            for service in services(servers.running[spec.name].pid):
                await _sample(service, arguments.out, arguments.seconds)


@dataclass(frozen=True, slots=True)
class Service:
    """A process of the cluster: its name, and which kind it is."""

    name: str
    pid: int


def services(launcher: int) -> list[Service]:
    """The launcher's descendants that serve, numbered where there are several of a kind."""
    found: dict[str, list[int]] = {}
    for process in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            for service in SERVICES:
                if service in words:
                    found.setdefault(service, []).append(process.pid)
    return [
        Service(name if len(pids) == 1 else f"{name}-{number}", pid)
        for name, pids in found.items()
        for number, pid in enumerate(pids)
    ]


@contextlib.asynccontextmanager
async def _under_load(load: LoadGenerator, num_streams: int) -> AsyncIterator[None]:
    """So many requests at once, begun anew as they end."""

    async def stream() -> None:
        while True:
            await load.request(PROMPT_TOKENS, OUTPUT_TOKENS)

    streams = [asyncio.create_task(stream()) for _ in range(num_streams)]
    try:
        yield
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _sample(service: Service, out: Path, seconds: int) -> None:
    """Two recordings, one per form; says how much of the engine's thread is Python."""
    folded = out / f"{service.name}.folded"
    await _record(service.pid, "raw", folded, seconds)
    await _record(service.pid, "flamegraph", out / f"{service.name}.svg", seconds)
    _tell(service.name, folded, ENGINE_THREAD)


async def _record(pid: int, form: str, path: Path, seconds: int) -> None:
    """Raises RuntimeError if py-spy is missing or may not look into the process."""
    command = [_py_spy(), "record", f"--pid={pid}", f"--format={form}", f"--duration={seconds}", f"--output={path}"]
    process = await asyncio.create_subprocess_exec(
        *command, "--native", "--threads", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"py-spy ended with code {process.returncode}; may it trace processes?\n{output.decode()}")


def _py_spy() -> str:
    """Raises RuntimeError if it is not installed."""
    found = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if found is None:
        raise RuntimeError("py-spy is not installed; it is in the extra: pip install -e '.[dev]'")
    return found


# --- forward passes


async def profile_steps(bench: StepBench, num_streams: int, out: Path, seconds: int) -> None:
    """A decode step and a chunk of a prompt, one after the other in this process."""
    steps = {"step-decode": bench.decode_batch(num_streams, CONTEXT), "step-prefill": bench.prompt(256, 256)}
    for name, chunks in steps.items():
        _trace(bench, chunks, out / name)
        folded = out / f"{name}.folded"
        recording = asyncio.create_task(_record(os.getpid(), "raw", folded, seconds))
        while not recording.done():
            await asyncio.sleep(0)  # lets the recording begin, and end
            bench.seconds([chunks])
        await recording
        _tell(name, folded, MAIN_THREAD)


def _trace(bench: StepBench, chunks: Sequence[Chunk], path: Path) -> None:
    batches = [chunks] * STEPS_PER_TRACE
    bench.seconds(batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        bench.seconds(batches)
    profiler.export_chrome_trace(str(path.with_suffix(".json")))
    table: str = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_OPERATORS)
    path.with_suffix(".txt").write_text(table)


def _tell(name: str, folded: Path, thread: str) -> None:
    """How much of a thread is Python, if it did anything."""
    found = shares(folded.read_text().splitlines(), thread)
    if found.total:
        print(
            f"{name}: {found.python_share:.0%} of its steps is Python ({found.python / found.total:.0%} interpreter, "
            f"{found.binding / found.total:.0%} torch's bindings; {found.total} samples)",
            flush=True,
        )


if __name__ == "__main__":
    main()
