"""What routing rows cost: one server, requests with and without rows in turns."""

import argparse
import asyncio

from benchmarks.load import LoadGenerator
from benchmarks.server import running
from benchmarks.serving import sample
from benchmarks.table import Samples
from deploy.client import ClusterClient

_BY_CONDITION = {"rows off": False, "rows on": True}


async def measure(command: str, repetitions: int) -> Samples:
    """`repetitions` values per condition and quantity; which condition goes first alternates."""
    samples = Samples()
    async with running(command) as url, ClusterClient(url) as client:
        loads = {
            condition: LoadGenerator(client, {"return_routed_experts": enabled})
            for condition, enabled in _BY_CONDITION.items()
        }
        for load in loads.values():
            await load.warm_up()
        for number in range(repetitions):
            for condition in reversed(loads) if number % 2 else loads:
                await sample(loads[condition], condition, samples)
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--server", required=True, metavar="COMMAND", help="starts moerelay on {port}")
    parser.add_argument("--repetitions", type=int, default=6, help="values per condition (default: %(default)s)")
    arguments = parser.parse_args()
    samples = asyncio.run(measure(arguments.server, arguments.repetitions))
    print("\n".join(samples.table(baseline="rows off")))


if __name__ == "__main__":
    main()
