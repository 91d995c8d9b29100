"""The parent of router processes: what it does when one of them cannot start, or when it is stopped in between."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from common.config import RouterSettings
from common.errors import WorkerLostError
from router.processes.parent import Parent
from router.processes.sockets import bind
from tests.unit.router.test_processes import poll, written

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot share a port there")


def children() -> set[int]:
    """Process ids of the router processes of this test."""
    found = set()
    for child in psutil.Process().children():
        try:
            if "router.processes" in child.cmdline():
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


@dataclass
class Running:
    stop: asyncio.Event
    end: asyncio.Task[None]

    async def ended(self) -> None:
        """Raises what the parent ended with."""
        await asyncio.wait_for(self.end, 60)
        assert children() == set()


@asynccontextmanager
async def parent_of_two(
    folder: Path, *, model: Path | None = None, stopped: bool = False, **limits: Any
) -> AsyncIterator[Running]:
    """In this process; all processes serve, unless it was `stopped` before it began."""
    ready = folder / "ready.json"
    settings = RouterSettings(router_processes=2, model=None if model is None else str(model), ready_file=ready)
    with closing(bind("127.0.0.1", 0, 2)) as port:
        stop = asyncio.Event()
        if stopped:
            stop.set()
        end = asyncio.create_task(Parent(settings, folder, port.sockets, [], stop, **limits).run())
        try:
            if not stopped:
                await poll(lambda: written(ready))
            yield Running(stop, end)
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)


@contextmanager
def without(folder: Path) -> Iterator[None]:
    """While it has another name."""
    moved = folder.rename(folder.with_name("moved"))
    yield
    moved.rename(folder)


def kill_one() -> tuple[int, int]:
    """Ids of the process that was killed and of the other one."""
    victim, other = sorted(children())
    os.kill(victim, 9)
    return victim, other


async def logged(logs: list[Any], event: str) -> None:
    async def is_there() -> bool:
        return any(each["event"] == event for each in logs)

    await poll(is_there)


async def test_stopped_before_the_processes_are_there(tmp_path: Path) -> None:
    async with parent_of_two(tmp_path, stopped=True) as running:
        await running.ended()


async def test_stopped_before_a_process_is_replaced(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with parent_of_two(tmp_path, restart_pause_s=3600) as running:
            kill_one()
            await logged(logs, "router_process_died")
            running.stop.set()
            await running.ended()


async def test_stopped_before_a_replacement_serves(tmp_path: Path) -> None:
    """It ends of the signal, because nothing waits for one yet; that is no failure."""
    async with parent_of_two(tmp_path, restart_pause_s=0) as running:
        _, other = kill_one()

        async def is_starting() -> bool:
            return len(children() - {_, other}) == 1

        await poll(is_starting)
        running.stop.set()
        await running.ended()


async def test_a_replacement_that_cannot_start_leaves_the_others_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with capture_logs() as logs:
        async with parent_of_two(tmp_path, model=model, restart_pause_s=0.01) as running:
            with without(model):
                _, other = kill_one()
                await logged(logs, "router_process_not_replaced")
                assert other in children()

            async def is_replaced() -> bool:
                return len(children()) == 2

            await poll(is_replaced)
            running.stop.set()
            await running.ended()
    assert "is not a directory" in next(e["reason"] for e in logs if e["event"] == "router_process_not_replaced")


async def test_a_process_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with parent_of_two(tmp_path, restart_pause_s=0.01, ping_interval_s=1.0) as running:
            victim, other = sorted(children())
            os.kill(victim, signal.SIGSTOP)
            await logged(logs, "router_process_died")

            async def is_replaced() -> bool:
                return len(children()) == 2

            await poll(is_replaced)
            assert victim not in children()
            assert other in children()
            running.stop.set()
            await running.ended()
    assert [each["pid"] for each in logs if each["event"] == "router_process_hangs"] == [victim]


async def test_a_process_that_cannot_be_replaced_ends_the_router_in_order(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    async with parent_of_two(tmp_path, model=model, restart_pause_s=0.01, max_failed_restarts=1) as running:
        with without(model):
            kill_one()
            with pytest.raises(WorkerLostError, match=r"cannot be replaced: --model .* is not a directory"):
                await running.ended()
    assert capfd.readouterr().err.count('"router_draining"') == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_what_else_is_printed_is_not_taken_for_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with parent_of_two(tmp_path) as running:
        for child in children():
            fds = Path(f"/proc/{child}/fd")
            # Nobody reads it after the first lines.
            assert (fds / "1").readlink() == (fds / "2").readlink()
        running.stop.set()
        await running.ended()
