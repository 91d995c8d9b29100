"""moerelay beside vLLM in one run, every quantity in turns, with ratios and what was aimed at.

Everything that was measured is kept until the run is complete: a run that was interrupted, or in which a stage failed,
goes on where it was when the same command is given again.
"""

import argparse
import asyncio
import datetime
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import peer, report
from benchmarks.bound import Roofline
from benchmarks.journal import Journal
from benchmarks.machine import ROOT, commit, state_of_the_code, this_machine
from benchmarks.plan import DIRECTORY, STAGES, Options, checkpoint_argument, path_from_env, plan
from benchmarks.roofline import measure_roofline
from benchmarks.server import stop_servers_on_sigterm
from benchmarks.stages.conditions import Servers
from benchmarks.stages.stage import Stage
from benchmarks.targets import Results, all_targets, table
from common.cores import num_cores
from common.errors import MoerelayError
from common.model.families import parse_config


def main() -> int:
    options = Options.of(_parser().parse_args())
    stop_servers_on_sigterm()
    make_checkpoint(options.model)
    if options.vllm:
        peer.install(options.vllm)
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "machine": this_machine().to_json(),
        "vllm": peer.VERSION if options.vllm else None,
        "warning": peer.shortcoming(options.vllm) if options.vllm else None,
        "repetitions": options.repetitions,
    }
    if about["warning"]:
        print(f"warning: {about['warning']}", file=sys.stderr)
    journal = Journal(options.journal, f"{state_of_the_code()} {options}")
    roofline = measure_roofline(num_cores())
    failed = asyncio.run(_run(options, journal))
    results = _results(options, journal, roofline)
    targets = all_targets(options.num_turns)
    print("\n".join(table(results, targets)))
    print("\n".join(report.stage_tables(results.stages)))
    if failed:
        print(f"failed: {', '.join(failed)}; the same command measures only what is missing", file=sys.stderr)
        return 1
    if options.is_complete:
        about["roofline"] = {"read_bytes_per_s": roofline.read_bytes_per_s, "bf16_flop_per_s": roofline.bf16_flop_per_s}
        report.write(ROOT, results, targets, about)
    journal.finish()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="rounds of the serving stage; the others follow it")
    parser.add_argument("--only", nargs="+", choices=STAGES, help="some stages; the documentation is left as it is")
    parser.add_argument(
        "--without-peer", action="store_true", help="moerelay alone; the documentation is left as it is"
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="for everything that is made here")
    checkpoint_argument(parser)
    parser.add_argument(
        "--vllm", type=Path, default=path_from_env("BENCH_VLLM"), help="an environment that vLLM is or goes in"
    )
    return parser


def make_checkpoint(path: Path) -> None:
    """Writes the bench preset there, unless a checkpoint is there."""
    if (path / "config.json").exists():
        return
    preset = ("--family=qwen3_moe", "--preset=bench", "--seed=0")
    subprocess.run([sys.executable, "-m", "deploy.cli", "make-model", *preset, f"--out={path}"], check=True)


async def _run(options: Options, journal: Journal) -> list[str]:
    """Measures every round that is missing; returns the stages that failed."""
    failed = []
    async with Servers(options.directory / "logs") as servers:
        for stage in plan(options, servers):
            if not await _run_stage(stage, journal):
                failed.append(stage.name)
    return failed


async def _run_stage(stage: Stage, journal: Journal) -> bool:
    for number in range(stage.num_rounds):
        if journal.has(stage.name, number):
            continue
        begun = time.perf_counter()
        try:
            samples = await stage.measure(number)
        except (RuntimeError, OSError, MoerelayError, ExceptionGroup) as error:
            print(f"{stage.name} failed: {error!r}", file=sys.stderr, flush=True)
            return False
        journal.record(stage.name, number, samples)
        took = f"{time.perf_counter() - begun:.0f} s"
        print(f"{stage.name}, round {number + 1} of {stage.num_rounds}: {took}", file=sys.stderr, flush=True)
    return True


def _results(options: Options, journal: Journal, roofline: Roofline) -> Results:
    stages = {name: journal.samples(name) for name in STAGES}
    return Results({n: s for n, s in stages.items() if s.conditions}, roofline, parse_config(options.model))


if __name__ == "__main__":
    sys.exit(main())
