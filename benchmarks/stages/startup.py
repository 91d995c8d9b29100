"""Time until a server serves, and the memory of all its processes after a load, one server at a time."""

from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.load import LoadGenerator
from benchmarks.stages.conditions import MAX_CONNECTIONS, ServerSpec, start
from benchmarks.stages.serving import exercise
from benchmarks.stages.stage import balanced
from benchmarks.table import Quantity, Samples
from deploy.client import ClusterClient

START = Quantity("start until it serves", "s", higher_is_better=False)
MEMORY = Quantity("memory of all processes after a load", "MiB", higher_is_better=False)


class StartupStage:
    """Starts each server, loads it, and stops it again."""

    name = "startup"

    def __init__(self, specs: Sequence[ServerSpec], num_rounds: int, logs: Path) -> None:
        self.num_rounds = num_rounds
        self._specs = specs
        self._logs = logs

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        samples = Samples()
        for spec in balanced(self._specs, number):
            async with start(spec, self._logs) as server, ClusterClient(server.url, MAX_CONNECTIONS) as client:
                samples.add(spec.name, START, server.start_s)
                await exercise(LoadGenerator(client))
                samples.add(spec.name, MEMORY, _all_memory(server.pid) / 2**20)
        return samples


def _all_memory(pid: int) -> float:
    """Bytes of a process and its descendants; what they share counts once, so proportional set sizes are added."""
    process = psutil.Process(pid)
    return float(sum(each.memory_full_info().pss for each in [process, *process.children(recursive=True)]))
