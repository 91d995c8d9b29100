"""Time to first token and decode rate of one or several servers of /inference/v1/generate, measured in turns.

All servers stay up, and each quantity is measured on one after the other before the next is, so that a machine that
changes its speed meanwhile treats them alike. They need memory together, and must not compute while they are idle.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
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


async def measure(loads: Mapping[str, LoadGenerator], repetitions: int) -> Samples:
    """`repetitions` values of every quantity under every condition, the conditions in turns; shows how far it is."""
    samples = Samples()
    for load in loads.values():
        await load.warm_up()
    for number in range(repetitions):
        print(f"repetition {number + 1} of {repetitions}", file=sys.stderr, flush=True)
        for num_tokens in PROMPTS:
            for condition, load in loads.items():
                samples.add(condition, ttft(num_tokens), 1e3 * await load.time_to_first_token(num_tokens))
        for concurrency in CONCURRENCIES:
            for condition, load in loads.items():
                samples.add(condition, decode(concurrency), await load.decode_rate(concurrency))
    return samples


async def measure_servers(servers: Sequence[Server], repetitions: int) -> Samples:
    """Starts all servers, measures them, and stops them."""
    async with AsyncExitStack() as stack:
        loads = {}
        for server in servers:
            url = await stack.enter_async_context(running(server.command))
            loads[server.name] = LoadGenerator(await stack.enter_async_context(ClusterClient(url)))
        return await measure(loads, repetitions)


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
    parser.add_argument("--repetitions", type=int, default=5, help="values per cell (default: %(default)s)")
    arguments = parser.parse_args()
    servers: list[Server] = arguments.server
    samples = asyncio.run(measure_servers(servers, arguments.repetitions))
    print("\n".join(samples.table(baseline=servers[0].name)))


if __name__ == "__main__":
    main()
