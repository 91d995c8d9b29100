"""What routing rows cost: one server, requests with and without rows in turns."""

import argparse
import asyncio

from benchmarks.load import LoadGenerator
from benchmarks.server import running
from benchmarks.serving import measure
from benchmarks.table import Samples
from deploy.client import ClusterClient

_BY_CONDITION = {"rows off": False, "rows on": True}


async def measure_both(command: str, repetitions: int) -> Samples:
    """Starts the server, measures it under both conditions, and stops it."""
    async with running(command) as url, ClusterClient(url) as client:
        loads = {
            condition: LoadGenerator(client, {"return_routed_experts": enabled})
            for condition, enabled in _BY_CONDITION.items()
        }
        return await measure(loads, repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture", description=__doc__)
    parser.add_argument("--server", required=True, metavar="COMMAND", help="starts moerelay on {port}")
    parser.add_argument("--repetitions", type=int, default=6, help="values per condition (default: %(default)s)")
    arguments = parser.parse_args()
    samples = asyncio.run(measure_both(arguments.server, arguments.repetitions))
    print("\n".join(samples.table(baseline="rows off")))


if __name__ == "__main__":
    main()
