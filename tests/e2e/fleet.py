"""A router and workers that a test kills, freezes, stops and starts again, at the same address or at a new one."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.cluster import Client, JsonObject, until

Role = Literal["prefill", "decode"]

START_TIMEOUT_S = 200.0
#: Of a worker that stands still, above any pause that a busy machine makes; the second silence ends its requests.
HEARTBEAT_TIMEOUT_S = 5.0
#: Of an engine that hangs in a step, likewise.
STEP_TIMEOUT_S = 8.0
#: A router hears of anything in less: heartbeats, and lookups of where workers are, are frequent here.
NOTICED_S = 40.0
#: Whoever is waited for in vain is waited for as long, or longer.
WAIT_S = 20.0
#: A process that takes longer to say how it is does not say it.
HEALTH_TIMEOUT_S = 5.0

ROUTER_FLAGS = (
    *("--heartbeat-interval-s", "0.2", "--heartbeat-timeout-s", f"{HEARTBEAT_TIMEOUT_S:g}"),
    *("--discovery-interval-s", "0.2", "--connect-timeout-s", f"{WAIT_S:g}"),
)
WORKER_FLAGS = (
    *("--dtype", "float32", "--num-kv-blocks", "600", "--threads", "1", "--max-num-batched-tokens", "64"),
    *("--step-timeout-s", f"{STEP_TIMEOUT_S:g}", "--handoff-timeout-s", f"{3 * WAIT_S:g}"),
)


@dataclass(eq=False)
class Process:
    """One service of the fleet; `address` is known once it serves."""

    name: str
    popen: subprocess.Popen[bytes]
    ready_file: Path
    log: Path
    role: Role | None = None
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.ready_file.exists():
            assert self.popen.poll() is None, f"exit code {self.popen.returncode}:\n{self.last_lines()}"
            assert time.monotonic() < deadline, f"not ready within {START_TIMEOUT_S} s:\n{self.last_lines()}"
            time.sleep(0.05)  # a poll: a file offers nothing to wait on
        self.address = json.loads(self.ready_file.read_text())["address"]

    def last_lines(self) -> str:
        return self.log.read_text()[-4000:]

    def kill(self) -> None:
        """As when its machine runs out of memory."""
        self.popen.kill()
        self.popen.wait()

    def freeze(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)


@dataclass
class Fleet:
    """The router finds its workers in two files."""

    model: Path
    folder: Path
    router: Process
    router_flags: tuple[str, ...] = ()
    workers: list[Process] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    #: All that was ever started, also what never served.
    _launched: list[Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.router.address}"

    def of(self, role: Role) -> list[Process]:
        return [worker for worker in self.workers if worker.role == role]

    def launch(self, role: Role, *flags: str, port: int = 0) -> Process:
        """Starts a worker, which the router will find once `admit` has been called."""
        name = f"{role}-{next(self._numbers)}"
        command = ("--model", str(self.model), "--port", str(port), "--worker-id", name, *WORKER_FLAGS, *flags)
        worker = _start(f"{role}_worker", name, self.folder, *command, role=role)
        self._launched.append(worker)
        return worker

    def admit(self, *workers: Process) -> None:
        """Waits until they serve and lists them."""
        for worker in workers:
            worker.wait_ready()
        self.workers += workers
        self.publish()

    def drop(self, *workers: Process) -> None:
        """They are not listed any more."""
        self.workers = [worker for worker in self.workers if worker not in workers]
        self.publish()

    def publish(self) -> None:
        for role in ("prefill", "decode"):
            partial = self.folder / f"{role}.partial"
            partial.write_text("".join(f"{worker.address}\n" for worker in self.workers if worker.role == role))
            partial.replace(self.folder / role)

    def restart(self, worker: Process) -> Process:
        """In the place of one that has ended, at its address."""
        again = self.launch(worker.role or "decode", port=int(worker.address.rpartition(":")[2]))
        self.workers[self.workers.index(worker)] = again
        again.wait_ready()
        return again

    def restart_router(self) -> None:
        """In the place of one that has ended, at its address."""
        port = self.router.address.rpartition(":")[2]
        self.router = _start_router(self.folder, f"router-{next(self._numbers)}", port, self.router_flags)
        self.router.wait_ready()

    def complete(self, prefill: int = 2, decode: int = 2) -> None:
        """Makes up for what an earlier test has ended."""
        if self.router.popen.poll() is not None:
            self.restart_router()
        gone = [worker for worker in self.workers if worker.popen.poll() is not None]
        self.drop(*gone)
        started = [self.launch("prefill") for _ in range(prefill - len(self.of("prefill")))]
        started += [self.launch("decode") for _ in range(decode - len(self.of("decode")))]
        self.admit(*started)

    def end(self) -> None:
        for process in (self.router, *self._launched):
            if process.popen.poll() is None:
                process.thaw()
                process.kill()


def _start(module: str, name: str, folder: Path, *flags: str, role: Role | None = None) -> Process:
    ready, log = folder / f"{name}.ready", folder / f"{name}.log"
    command = [sys.executable, "-m", module, "--ready-file", str(ready), *flags]
    with log.open("wb") as stderr:
        return Process(name, subprocess.Popen(command, stderr=stderr), ready, log, role)


def _start_router(folder: Path, name: str, port: str, flags: tuple[str, ...]) -> Process:
    sources = ("--prefill", f"file://{folder / 'prefill'}", "--decode", f"file://{folder / 'decode'}")
    return _start("router", name, folder, "--port", port, *sources, *ROUTER_FLAGS, *flags)


@contextmanager
def running_fleet(model: Path, folder: Path, *router_flags: str) -> Iterator[Fleet]:
    """A router without workers; nothing outlives the block."""
    for role in ("prefill", "decode"):
        (folder / role).touch()
    fleet = Fleet(model, folder, _start_router(folder, "router", "0", router_flags), router_flags)
    try:
        fleet.router.wait_ready()
        yield fleet
    finally:
        fleet.end()


@asynccontextmanager
async def client_of(fleet: Fleet) -> AsyncIterator[Client]:
    """No limit on connections: a request that waits in the client's pool would tell nothing."""
    timeout, pool = aiohttp.ClientTimeout(total=200), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=pool) as session:
        yield Client(session, fleet.url)


async def states(client: Client) -> dict[str, str]:
    """What the router thinks of each worker that it has heard."""
    workers: list[JsonObject] = (await client.json("/cluster"))["workers"]
    return {worker["id"]: worker["state"] for worker in workers}


async def until_states(client: Client, **expected: str) -> None:
    """Names are written with _ for -."""
    wanted = {name.replace("_", "-"): state for name, state in expected.items()}

    async def reached() -> bool:
        now = await states(client)
        return all(now.get(name) == state for name, state in wanted.items())

    await until(reached, NOTICED_S)


async def until_healthy(client: Client, *workers: Process) -> None:
    """The router has heard each of them."""
    await until_states(client, **{worker.name: "healthy" for worker in workers})


async def until_status(client: Client, path: str, status: int) -> None:
    async def reached() -> bool:
        async with client.session.get(client.url + path) as response:
            return response.status == status

    await until(reached, NOTICED_S)


async def until_not_serving(worker: Process) -> None:
    """It says so to whoever asks its standard health service, on a connection that it still accepts."""
    await until(lambda: _answers(worker, health_pb2.HealthCheckResponse.NOT_SERVING), NOTICED_S)


async def until_unwell(worker: Process) -> None:
    """Its health service says so, or does not answer."""

    async def reached() -> bool:
        try:
            return not await _answers(worker, health_pb2.HealthCheckResponse.SERVING)
        except grpc.RpcError:
            return True

    await until(reached, NOTICED_S)


async def _answers(worker: Process, status: int) -> bool:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        return bool(reply.status == status)
