"""Time to first token and decode rate of any servers of /inference/v1/generate, in turns."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan import DIRECTORY
from benchmarks.stages.conditions import Condition, Servers, ServerSpec
from benchmarks.stages.serving import ServingStage
from benchmarks.table import Samples


def condition(text: str) -> Condition:
    """'NAME=COMMAND' with `{port}` in the command. Raises ArgumentTypeError for anything else."""
    name, equals, command = text.partition("=")
    if not equals or "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in the command")
    return Condition(name, ServerSpec(name, tuple(shlex.split(command))))


async def measure(conditions: Sequence[Condition], repetitions: int, logs: Path) -> Samples:
    """Starts all servers, measures them, and stops them."""
    samples = Samples()
    async with Servers(logs) as servers:
        stage = ServingStage("serving", servers, conditions, repetitions)
        for number in range(repetitions):
            samples.extend(await stage.measure(number))
            print(f"repetition {number + 1} of {repetitions}", file=sys.stderr, flush=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument(
        "--server",
        type=condition,
        action="append",
        required=True,
        metavar="NAME=COMMAND",
        help="a server, with {port} where its port goes; repeatable; ratios are to the first one",
    )
    parser.add_argument("--repetitions", type=int, default=5, help="values per cell (default: %(default)s)")
    arguments = parser.parse_args()
    conditions: list[Condition] = arguments.server
    samples = asyncio.run(measure(conditions, arguments.repetitions, DIRECTORY / "logs"))
    print("\n".join(samples.table(baseline=conditions[0].name)))


if __name__ == "__main__":
    main()
