"""Time to first token and decode rate of one or several servers of /inference/v1/generate, measured in turns.

Each round starts every server alone, measures it and stops it, so that a machine that changes its speed meanwhile
treats all of them alike.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load import LoadGenerator
from benchmarks.server import running
from benchmarks.table import Quantity, Samples
from deploy.client import ClusterClient

PROMPTS = (512, 2048)
CONCURRENCIES = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Server:
    """A name for the table, and the command that serves on `{port}`."""

    name: str
    command: str

    @classmethod
    def parse(cls, text: str) -> "Server":
        name, equals, command = text.partition("=")
        if not equals or "{port}" not in command:
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND with {{port}} in the command")
        return cls(name, command)


def ttft(num_tokens: int) -> Quantity:
    return Quantity(f"TTFT {num_tokens}", "ms", higher_is_better=False)


def decode(concurrency: int) -> Quantity:
    return Quantity(f"decode C={concurrency}", "tok/s", higher_is_better=True)


async def sample(load: LoadGenerator, condition: str, samples: Samples) -> None:
    """One value of every quantity."""
    for num_tokens in PROMPTS:
        samples.add(condition, ttft(num_tokens), 1e3 * await load.time_to_first_token(num_tokens))
    for concurrency in CONCURRENCIES:
        samples.add(condition, decode(concurrency), await load.decode_rate(concurrency))


async def measure(servers: Sequence[Server], rounds: int, repetitions: int) -> Samples:
    """`rounds` × `repetitions` values per server and quantity; shows the table so far after each round."""
    samples = Samples()
    for number in range(rounds):
        for server in servers:
            print(f"round {number + 1} of {rounds}: {server.name}", file=sys.stderr, flush=True)
            async with running(server.command) as url, ClusterClient(url) as client:
                load = LoadGenerator(client)
                await load.warm_up()
                for _ in range(repetitions):
                    await sample(load, server.name, samples)
        print("\n".join(samples.table(baseline=servers[0].name)), file=sys.stderr, flush=True)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument(
        "--server",
        type=Server.parse,
        action="append",
        required=True,
        metavar="NAME=COMMAND",
        help="a server, with {port} where its port goes; repeatable; ratios are to the first one",
    )
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="values per start (default: %(default)s)")
    arguments = parser.parse_args()
    servers: list[Server] = arguments.server
    samples = asyncio.run(measure(servers, arguments.rounds, arguments.repetitions))
    print("\n".join(samples.table(baseline=servers[0].name)))


if __name__ == "__main__":
    main()
