"""The parent of several router processes: it binds the ports, starts the processes, replaces one that dies, and stops
them. It serves nothing itself.
"""

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from common.config import RouterSettings
from common.errors import ConfigError, StartupError, WorkerLostError
from common.process import host_port, stop_signals, write_ready_file
from router.calls import task_group
from router.processes.place import READY_LINE, REFUSAL, Place
from router.processes.sockets import bind

#: Between the death of a process and its replacement, so that one that dies of every request does not fill the log.
RESTART_PAUSE_S = 0.5

log = structlog.get_logger()


async def serve_in_processes(settings: RouterSettings) -> None:
    """Serves until SIGTERM or SIGINT with `settings.router_processes` processes, then has all of them drain.

    Raises:
        StartupError: a port cannot be bound, or a process refused to start.
        WorkerLostError: a process ended before it served, or not cleanly at the end.
    """
    if sys.platform == "win32":
        raise ConfigError("--router-processes must be 1 on Windows, where processes cannot share a port")
    count = settings.router_processes
    sockets = bind(settings.host, settings.port, count)
    control = [] if settings.admin_port is None else bind(settings.admin_host, settings.admin_port, 1)[0]
    with tempfile.TemporaryDirectory(prefix="moerelay-router-") as directory:
        async with stop_signals() as stop:
            await Parent(settings, Path(directory), sockets, control).run(stop)


class Parent:
    """Owns the processes: whoever leaves `run` leaves none behind."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Path,
        sockets: Sequence[Sequence[socket.socket]],
        control: Sequence[socket.socket],
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._sockets = sockets
        self._control = control
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._ready = [asyncio.Event() for _ in sockets]
        self._stopping = False
        self._codes: list[int] = []
        self._keepers: list[asyncio.Task[None]] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Starts all, keeps them alive until `stop` is set, and waits until they have drained."""
        async with task_group() as group:
            self._keepers = [group.create_task(self._keep(index)) for index in range(len(self._sockets))]
            starting = group.create_task(self._all_ready())
            stopped = group.create_task(stop.wait())
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                self._announce()
                await stopped
            starting.cancel()
            self._stopping = True
            again = group.create_task(self._signal_each_time(stop))
            await asyncio.gather(*self._keepers)
            again.cancel()
        if any(self._codes):
            raise WorkerLostError(f"router processes ended with the codes {self._codes}")

    async def _all_ready(self) -> None:
        for ready in self._ready:
            await ready.wait()

    def _announce(self) -> None:
        address = _address(self._settings.host, self._sockets[0])
        control = _address(self._settings.admin_host, self._control) if self._control else None
        log.info("router_listening", address=address, control_address=control, processes=len(self._sockets))
        if self._settings.ready_file:
            write_ready_file(self._settings.ready_file, address, control)

    async def _signal_each_time(self, stop: asyncio.Event) -> None:
        """The first signal drains the processes, a further one ends them at once."""
        while True:
            stop.clear()
            for process in self._processes.values():
                with suppress(ProcessLookupError):  # ended in this moment
                    process.send_signal(signal.SIGTERM)
            await stop.wait()

    async def _keep(self, index: int) -> None:
        """One process after the other, until the router stops."""
        while True:
            process = await self._start(index)
            try:
                await self._serve(process, index)
                code = await process.wait()
            finally:
                await _end(process)
                del self._processes[index]
            if self._stopping:
                # Ours was the last hold on them: who connects now is refused, instead of waiting for nobody.
                for each in self._sockets[index]:
                    each.close()
                # One that was told to stop before it served has nothing to drain.
                self._codes.append(code if self._ready[index].is_set() else 0)
                return
            log.error("router_process_died", index=index, code=code, hint="its requests are lost; it is started again")
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        control = [each.fileno() for each in self._control] if index == 0 else []
        fds = [each.fileno() for each in self._sockets[index]]
        process = await asyncio.create_subprocess_exec(
            # -P: a folder named "router" in the working directory must not be taken for ours.
            *(sys.executable, "-P", "-m", "router.processes"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=[*fds, *control],
            # Ctrl-C reaches the whole foreground group; the parent alone decides who stops when.
            start_new_session=True,
        )
        self._processes[index] = process
        settings = self._settings.model_dump_json()
        place = Place(settings, index, len(self._sockets), str(self._directory), fds, control)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(place) + b"\n")
        return process

    async def _serve(self, process: asyncio.subprocess.Process, index: int) -> None:
        """Returns once the process serves. Raises if it never does."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        if line == READY_LINE:
            self._ready[index].set()
            return
        code = await process.wait()
        if self._stopping:
            return
        if line.startswith(REFUSAL):
            raise StartupError(line.removeprefix(REFUSAL).decode().strip())
        raise WorkerLostError(f"router process {index} ended with code {code} before it served")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def _address(host: str, sockets: Sequence[socket.socket]) -> str:
    return host_port(host, sockets[0].getsockname()[1])
