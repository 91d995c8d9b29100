"""A launcher whose services are stand-ins."""

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.config import UpSettings
from deploy.plan import ClusterPlan, Modules
from deploy.processes import ProcessGroup, StopRequests
from deploy.up import LocalCluster

REPOSITORY = Path(__file__).parents[3]
FAKES = Modules("tests.fakes.fake_prefill", "tests.fakes.fake_decode", "tests.fakes.fake_router", "json")


class Announcement(io.StringIO):
    """A stdout that tells when something was printed."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = asyncio.Event()

    def write(self, text: str) -> int:
        self.printed.set()
        return super().write(text)


class FakeCluster:
    """One `LocalCluster` of stand-ins, running."""

    def __init__(self, journal: Path) -> None:
        self.stdout = Announcement()
        self.stop = StopRequests()
        self.exit_code: asyncio.Task[int]
        self._journal = journal

    async def ready(self) -> None:
        await self.stdout.printed.wait()

    def events(self, kind: str) -> list[str]:
        """Names of the processes that wrote `kind`, in order."""
        return [line.split()[0] for line in self._lines() if line.split()[1] == kind]

    def pids(self) -> dict[str, int]:
        return {line.split()[0]: int(line.split()[2]) for line in self._lines() if line.split()[1] == "started"}

    def settings_of(self, name: str) -> dict[str, Any]:
        """The settings that a child read from its flags."""
        [line] = [line for line in self._lines() if line.startswith(f"{name} {{")]
        values: dict[str, Any] = json.loads(line.removeprefix(name))
        return values

    def _lines(self) -> list[str]:
        return self._journal.read_text().splitlines()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


StartCluster = Callable[..., Any]


@pytest.fixture
def start_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartCluster:
    """`async with start_cluster(faults={name: fault}, **settings) as cluster`."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))

    @asynccontextmanager
    async def start(
        faults: dict[str, str] | None = None, modules: Modules = FAKES, **settings: Any
    ) -> AsyncIterator[FakeCluster]:
        monkeypatch.setenv("FAKE_FAULTS", json.dumps(faults or {}))
        plan = ClusterPlan(UpSettings(model="m", port=0, **settings), tmp_path, modules)
        cluster = FakeCluster(tmp_path / "journal")
        async with ProcessGroup() as group:
            local = LocalCluster(plan, group, cluster.stdout, exit_grace_s=1.0)
            cluster.exit_code = asyncio.ensure_future(local.run(cluster.stop))
            try:
                yield cluster
            finally:
                cluster.exit_code.cancel()
                await asyncio.wait([cluster.exit_code])

    return start
