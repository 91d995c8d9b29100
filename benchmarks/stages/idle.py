"""What servers compute while nobody asks them anything: they are all up while one of them is measured."""

import asyncio
from collections.abc import Sequence

import psutil

from benchmarks.stages.conditions import Condition, Servers
from benchmarks.table import Quantity, Samples

#: Until what follows a request is over.
SETTLE_S = 2.0
WATCH_S = 4.0

IDLE = Quantity("CPU while idle", "% of a core", higher_is_better=False)


class IdleStage:
    """Starts every server, and watches all of them do nothing."""

    name = "idle"
    num_rounds = 1

    def __init__(self, servers: Servers, conditions: Sequence[Condition]) -> None:
        self._servers = servers
        self._conditions = conditions

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        for condition in self._conditions:
            await self._servers.load(condition)
        await asyncio.sleep(SETTLE_S)
        families = {name: _family(server.pid) for name, server in self._servers.running.items()}
        before = {name: _cpu_s(family) for name, family in families.items()}
        await asyncio.sleep(WATCH_S)
        samples = Samples()
        for name, family in families.items():
            samples.add(name, IDLE, 100 * (_cpu_s(family) - before[name]) / WATCH_S)
        return samples


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _cpu_s(family: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in family]
    return sum(time.user + time.system for time in times)
