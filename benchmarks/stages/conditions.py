"""The servers that are compared, and the conditions: a server and what its requests ask for."""

import re
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import peer
from benchmarks.load import LoadGenerator
from benchmarks.server import Server, serving
from benchmarks.stages.names import AGGREGATED_SERVER, DISAGGREGATED_SERVER, PEER_SERVER
from deploy.client import ClusterClient

#: More streams than any stage has at once.
MAX_CONNECTIONS = 256
#: What a server of the bench preset takes, and some more.
MEMORY_WANTED_BYTES = 6 * 2**30


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """A command that serves on `{port}`."""

    name: str
    command: tuple[str, ...]
    extra_env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Condition:
    """`sampling`: parameters on top of those of every request."""

    name: str
    server: ServerSpec
    sampling: Mapping[str, object] = field(default_factory=dict)


def vllm(venv: Path, model: Path, *extra: str, name: str = PEER_SERVER) -> ServerSpec:
    """The peer at its best; `extra` are flags of its own."""
    return ServerSpec(name, tuple(peer.command(venv, model, *extra)), peer.environment(venv))


def aggregated(model: Path, *extra: str) -> ServerSpec:
    """One worker that prefills and decodes, on every core."""
    return _moerelay(AGGREGATED_SERVER, model, "--mode=aggregated", *extra)


def disaggregated(model: Path, *extra: str) -> ServerSpec:
    """One worker of each kind, which share the cores."""
    return _moerelay(DISAGGREGATED_SERVER, model, "--prefill=1", "--decode=1", *extra)


def _moerelay(name: str, model: Path, *flags: str) -> ServerSpec:
    base = (sys.executable, "-m", "deploy.cli", "up", f"--model={model}", "--port={port}", "--log-level=warning")
    return ServerSpec(name, (*base, *flags))


class Servers:
    """Starts servers when they are first asked for, and stops all of them when the context is left."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._stack = AsyncExitStack()
        self._running: dict[str, tuple[Server, ClusterClient]] = {}

    async def __aenter__(self) -> "Servers":
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def load(self, condition: Condition) -> LoadGenerator:
        """What sends a condition's requests; its server is warm."""
        is_new = condition.server.name not in self._running
        load = LoadGenerator(await self.client(condition.server), condition.sampling)
        if is_new:
            await load.warm_up()
        return load

    async def client(self, spec: ServerSpec) -> ClusterClient:
        """Raises RuntimeError if the server does not start."""
        if spec.name not in self._running:
            if psutil.virtual_memory().available < MEMORY_WANTED_BYTES:
                print(f"warning: little memory is left for {spec.name}; stop something else", file=sys.stderr)
            print(f"starting {spec.name}", file=sys.stderr, flush=True)
            server = await self._stack.enter_async_context(start(spec, self._logs))
            client = await self._stack.enter_async_context(ClusterClient(server.url, MAX_CONNECTIONS))
            self._running[spec.name] = server, client
        return self._running[spec.name][1]

    @property
    def running(self) -> dict[str, Server]:
        """Those that were started, by name."""
        return {name: server for name, (server, _) in self._running.items()}


def start(spec: ServerSpec, logs: Path) -> AbstractAsyncContextManager[Server]:
    """Runs a server whose output goes to a file named after it."""
    log = logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', spec.name)}.log"
    return serving(spec.command, extra_env=spec.extra_env, log=log)
