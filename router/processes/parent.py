"""The parent of several router processes: it binds the ports, starts the processes, replaces one that dies, and stops
them. It serves nothing itself.
"""

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import structlog

from common.config import RouterSettings
from common.errors import ConfigError, MoerelayError, StartupError, WorkerLostError
from common.process import host_port, stop_signals, write_ready_file
from router.calls import task_group
from router.processes.counter_memory import counter_file
from router.processes.place import DIRECTORY_PREFIX, READY_LINE, REFUSAL, Place
from router.processes.siblings import socket_path
from router.processes.sockets import SharedPort, bind
from router.processes.watch import PING_INTERVAL_S, kill_when_silent

#: Between the death of a process and its replacement, so that one that dies of every request does not fill the log.
RESTART_PAUSE_S = 0.5
#: A replacement that does not come to serve is tried again, each time after twice the pause, this often at most: to its
#: sockets belongs a share of the connections, for which nobody answers meanwhile.
MAX_FAILED_RESTARTS = 6

log = structlog.get_logger()


async def serve_in_processes(settings: RouterSettings) -> None:
    """Serves until SIGTERM or SIGINT with `settings.router_processes` processes, then has all of them drain.

    Raises:
        StartupError: a port cannot be bound, or a process refused to start.
        WorkerLostError: a process ended before it served, could not be replaced, or ended not cleanly.
    """
    if sys.platform == "win32":
        raise ConfigError("--router-processes must be 1 on Windows, where processes cannot share a port")
    with (
        closing(bind(settings.host, settings.port, settings.router_processes)) as public,
        closing(_bind_control(settings)) as control,
        tempfile.TemporaryDirectory(prefix=DIRECTORY_PREFIX) as directory,
    ):
        async with stop_signals() as stop:
            await Parent(settings, Path(directory), public.sockets, control.sockets[0], stop).run()


def _bind_control(settings: RouterSettings) -> SharedPort:
    """Of process 0; without sockets if there is to be no control port."""
    if settings.admin_port is None:
        return SharedPort([[]], [])
    return bind(settings.admin_host, settings.admin_port, 1)


class Parent:
    """Owns the processes: whoever leaves `run` leaves none behind."""

    def __init__(
        self,
        settings: RouterSettings,
        directory: Path,
        sockets: Sequence[Sequence[socket.socket]],
        control: Sequence[socket.socket],
        stop: asyncio.Event,
        *,
        restart_pause_s: float = RESTART_PAUSE_S,
        max_failed_restarts: int = MAX_FAILED_RESTARTS,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._sockets = sockets
        self._control = control
        self._stop = stop
        self._restart_pause_s = restart_pause_s
        self._max_failed_restarts = max_failed_restarts
        self._ping_interval_s = ping_interval_s
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        #: Descriptor of what they count in, while `run` runs.
        self._counter_fd = -1
        #: Whether the first process of each index has served.
        self._started = [asyncio.Event() for _ in sockets]
        self._stopping = asyncio.Event()
        self._codes: list[int] = []
        self._failure: WorkerLostError | None = None

    async def run(self) -> None:
        """Starts all, keeps them alive until `stop` is set, and waits until they have drained."""
        with counter_file(len(self._sockets)) as self._counter_fd:
            await self._run()
        if self._failure:
            raise self._failure
        if any(self._codes):
            raise WorkerLostError(f"router processes ended with the codes {self._codes}")

    async def _run(self) -> None:
        async with task_group() as group:
            keepers = [group.create_task(self._keep(index)) for index in range(len(self._sockets))]
            starting = group.create_task(self._all_started())
            stopped = group.create_task(self._stop.wait())
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                self._announce()
                await stopped
            starting.cancel()
            self._stopping.set()
            again = group.create_task(self._signal_each_time())
            await asyncio.gather(*keepers)
            again.cancel()

    async def _all_started(self) -> None:
        for started in self._started:
            await started.wait()

    def _announce(self) -> None:
        address = _address(self._settings.host, self._sockets[0])
        control = _address(self._settings.admin_host, self._control) if self._control else None
        log.info("router_listening", address=address, control_address=control, processes=len(self._sockets))
        if self._settings.ready_file:
            tls = self._settings.ssl_certfile is not None
            write_ready_file(self._settings.ready_file, address, control, tls=tls)

    async def _signal_each_time(self) -> None:
        """The first signal drains the processes, a further one ends them at once."""
        while True:
            self._stop.clear()
            for process in self._processes.values():
                _terminate(process)
            await self._stop.wait()

    async def _keep(self, index: int) -> None:
        """One process after the other, until the router stops. Raises if the first one never serves."""
        failed = 0
        while not self._stopping.is_set():
            try:
                await self._serve_once(index)
                failed = 0
            except (StartupError, WorkerLostError) as error:
                if not self._started[index].is_set():
                    raise
                failed += 1
                log.error("router_process_not_replaced", index=index, attempt=failed, reason=error.message)
                if failed == self._max_failed_restarts:
                    self._give_up(index, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._restart_pause_s * 2**failed)
        # Ours was the last hold on them: who connects now is refused, instead of waiting for nobody.
        for each in self._sockets[index]:
            each.close()

    def _give_up(self, index: int, error: MoerelayError) -> None:
        """As a signal would: the other processes let their requests finish."""
        if not self._stopping.is_set():
            self._failure = WorkerLostError(f"router process {index} cannot be replaced: {error.message}")
            self._stopping.set()
            self._stop.set()

    async def _serve_once(self, index: int) -> None:
        """One process, from its start to its end. Raises if it ends before it served, unless it was told to."""
        process = await self._start(index)
        try:
            if self._stopping.is_set():  # it was not there yet when the others were signalled
                _terminate(process)
            served = await self._serves(process, index)
            code = await self._watched(process, index) if served else await process.wait()
        finally:
            await _end(process)
            del self._processes[index]
        if self._stopping.is_set():
            # One that was told to stop before it served has nothing to drain.
            self._codes.append(code if served else 0)
        elif served:
            log.error("router_process_died", index=index, code=code, hint="its requests are lost; it is started again")
        else:
            raise WorkerLostError(f"router process {index} ended with code {code} before it served")

    async def _watched(self, process: asyncio.subprocess.Process, index: int) -> int:
        """The code with which it ends. One that hangs is killed."""
        watch = asyncio.create_task(
            kill_when_silent(process, socket_path(self._directory, index), interval_s=self._ping_interval_s)
        )
        try:
            return await process.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        control = [each.fileno() for each in self._control] if index == 0 else []
        fds = [each.fileno() for each in self._sockets[index]]
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: a folder named "router" in the working directory must not be taken for ours.
                *(sys.executable, "-P", "-m", "router.processes"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[*fds, *control, self._counter_fd],
                # Ctrl-C reaches the whole foreground group; the parent alone decides who stops when.
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerLostError(f"router process {index} cannot be started: {error}") from error
        self._processes[index] = process
        settings = self._settings.model_dump_json()
        place = Place(settings, index, len(self._sockets), self._counter_fd, str(self._directory), fds, control)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(place) + b"\n")
        return process

    async def _serves(self, process: asyncio.subprocess.Process, index: int) -> bool:
        """Returns once the process serves, or has ended without. Raises StartupError if it refuses to."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line == READY_LINE:
                self._started[index].set()
                return True
            if line.startswith(REFUSAL) and not self._stopping.is_set():
                await process.wait()
                raise StartupError(line.removeprefix(REFUSAL).decode().strip())
            # Of what the interpreter runs before our code; that sends whatever else is printed to stderr.
            log.warning("router_process_said", index=index, line=line.decode(errors="replace").rstrip())
        return False


def _terminate(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # ended in this moment
        process.send_signal(signal.SIGTERM)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def _address(host: str, sockets: Sequence[socket.socket]) -> str:
    return host_port(host, sockets[0].getsockname()[1])
