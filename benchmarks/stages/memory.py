"""Resident memory of each moerelay worker beyond its weights and its KV pool, after a load."""

from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.load import LoadGenerator
from benchmarks.stages.conditions import MAX_CONNECTIONS, ServerSpec, start
from benchmarks.stages.serving import exercise
from benchmarks.stages.stage import balanced
from benchmarks.table import Quantity, Samples
from deploy.client import ClusterClient

#: So small that the load touches nearly all of it: untouched pages would hide as much of something else.
POOL_BYTES = 64 * 2**20
POOL_FLAG = f"--kv-cache-memory={POOL_BYTES}"

BEYOND = Quantity("RSS of the largest worker beyond weights and KV pool", "MiB", higher_is_better=False)


class MemoryStage:
    """Starts each server with a small pool, loads it, and looks at its workers.

    Args:
        specs: servers of ours that were given `POOL_FLAG`.
        weight_bytes: of the checkpoint, and so of a worker.
    """

    name = "memory"

    def __init__(self, specs: Sequence[ServerSpec], num_rounds: int, weight_bytes: int, logs: Path) -> None:
        self.num_rounds = num_rounds
        self._specs = specs
        self._weight_bytes = weight_bytes
        self._logs = logs

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        samples = Samples()
        for spec in balanced(self._specs, number):
            async with start(spec, self._logs) as server, ClusterClient(server.url, MAX_CONNECTIONS) as client:
                await exercise(LoadGenerator(client))
                largest = max(process.memory_info().rss for process in _workers(server.pid))
                samples.add(spec.name, BEYOND, (largest - self._weight_bytes - POOL_BYTES) / 2**20)
        return samples


def _workers(pid: int) -> list[psutil.Process]:
    """The launcher's descendants but the routers, which load no weights and are far smaller."""
    return psutil.Process(pid).children(recursive=True)


def weight_bytes(model: Path) -> int:
    """Of the checkpoint's files."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))
