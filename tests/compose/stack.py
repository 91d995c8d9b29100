"""The services of deploy/compose.yaml, started by docker-compose on an engine that answers."""

import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.e2e.cluster import Client, JsonObject

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "compose.yaml"
PROJECT = "moerelay-test"

#: A checkpoint is made, images are unpacked, and others use the machine meanwhile.
COMMAND_TIMEOUT_S = 240.0


class Stack:
    """One project. Commands block; in coroutines they belong into a thread."""

    def __init__(self, keys: Path, file: Path = FILE, project: str = PROJECT) -> None:
        self._project = project
        #: Where the stack makes its keys.
        self.keys = keys
        self._compose = ("docker-compose", "-f", str(file), "-p", project)
        self._port = _free_port()
        self._prometheus_port = _free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def prometheus_url(self) -> str:
        return f"http://127.0.0.1:{self._prometheus_port}"

    def api_key(self) -> str:
        """The newest that the stack has made."""
        lines = (self.keys / "api-keys.txt").read_text().splitlines()
        return next(line for line in lines if line.startswith("mr-"))

    @asynccontextmanager
    async def client(self, key: str) -> AsyncIterator[Client]:
        """Who asks with this key."""
        # A connection that is kept may be one to a router that is gone.
        connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(total=120)
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            yield Client(session, self.url)

    def compose(self, *arguments: str) -> str:
        """Runs docker-compose; returns its stdout. Raises AssertionError if it fails."""
        return self._run([*self._compose, *arguments])

    def up(self, *services: str, dependencies: bool = True, **replicas: int) -> None:
        """Starts what is not running yet, from images that are there, and ends what is too many."""
        scale = [f"--scale={service}={number}" for service, number in replicas.items()]
        no_deps = [] if dependencies else ["--no-deps"]
        self.compose("up", "-d", "--no-build", "--no-recreate", *no_deps, *scale, *services)

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        profiles = [f"--profile={name}" for name in ("load", "monitoring", "tools")]
        self.compose(*profiles, "down", "--volumes", "--timeout", "10")

    def docker(self, *arguments: str) -> str:
        return self._run(["docker", *arguments])

    def fails(self, *arguments: str) -> bool:
        """Whether a docker command exits with a code other than 0."""
        command = ["docker", *arguments]
        return subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False).returncode != 0

    def containers(self, service: str, *, ended_too: bool = False) -> list[str]:
        """Ids of its containers that run, in the order of their numbers."""
        filters = [
            f"--filter=label=com.docker.compose.{key}" for key in (f"project={self._project}", f"service={service}")
        ]
        everything = ["--all"] if ended_too else []
        names = self.docker("ps", *everything, "--no-trunc", "--format", "{{.Names}} {{.ID}}", *filters)
        return [line.split()[1] for line in sorted(names.splitlines())]

    def inspect(self, container: str) -> JsonObject:
        [found] = json.loads(self.docker("inspect", container))
        assert isinstance(found, dict)
        return found

    def address(self, container: str) -> str:
        """HOST:PORT as the router knows the worker."""
        networks = self.inspect(container)["NetworkSettings"]["Networks"]
        return f"{networks[f'{self._project}_cluster']['IPAddress']}:7000"

    def log(self, container: str) -> str:
        command = ["docker", "logs", container]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        ).stdout

    def _run(self, command: Sequence[str]) -> str:
        environment = os.environ | {
            "PUBLISH": f"127.0.0.1:{self._port}",
            "PUBLISH_PROMETHEUS": f"127.0.0.1:{self._prometheus_port}",
            "KEYS": str(self.keys),
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, env=environment
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
