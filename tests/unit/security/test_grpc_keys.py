"""Mutual TLS between router and workers, with real sockets: who gets through, and how keys change meanwhile."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import PrefillSettings
from common.pb import types_pb2, worker_pb2_grpc
from common.security.grpc_keys import CHANNEL_OPTIONS, channel_credentials
from common.security.key_file import KeyFile, watch_key_file
from common.worker.lifecycle import Lifecycle
from common.worker.server import WorkerServer
from deploy.keys.authority import Authority
from router.dependence import Dependence
from router.worker import Worker
from router.worker_state import State
from tests.fakes.cluster_keys import key_file, new_authority, rotated, write
from tests.fakes.fake_workers import FakeWorker, Script

AUTHORITY = new_authority()


class Served:
    """A worker's port whose keys are in a file; what it says there is a fake's."""

    def __init__(self, folder: Path, authority: Authority = AUTHORITY) -> None:
        self.path = write(folder / "prefill.json", key_file(authority, "prefill"))
        self._keys = watch_key_file(self.path, "prefill")
        settings = PrefillSettings(model="m", ready_file=folder / "ready.json")
        self.server = WorkerServer(settings, Lifecycle(), self._keys)
        self.fake = FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script())
        worker_pb2_grpc.add_WorkerServicer_to_server(self.fake, self.server.grpc)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Served"]:
        await self.server.grpc.start()
        try:
            yield self
        finally:
            await self.server.grpc.stop(None)

    def take(self, authority: Authority) -> None:
        """The file of that authority, as soon as it would be noticed."""
        write(self.path, key_file(authority, "prefill"))
        self._keys.poll()
        self._keys.poll()

    async def lets_in(self, keys: KeyFile | None) -> bool:
        """Whether a router with these keys, or none, gets an answer."""
        worker = worker_at(self.server.address, [keys] if keys else [])
        try:
            await worker.heartbeat(10)
            return worker.state is State.HEALTHY
        finally:
            await worker.close()


def worker_at(address: str, keys: list[KeyFile]) -> Worker:
    """As a router has it; it looks at keys[0]."""
    return Worker(
        address,
        "prefill",
        max_message_bytes=2**20,
        silence_limit_s=60,
        keys=(lambda: keys[0]) if keys else None,
    )


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with Served(tmp_path).running() as served:
        yield served


async def test_a_router_of_this_cluster_gets_in(served: Served) -> None:
    assert await served.lets_in(key_file(AUTHORITY, "router"))


async def test_nobody_else_does(served: Served) -> None:
    assert not await served.lets_in(None), "without keys"
    assert not await served.lets_in(key_file(new_authority(), "router")), "of another cluster"
    assert not await served.lets_in(key_file(AUTHORITY, "prefill")), "a worker that calls like a router"
    ours, theirs = key_file(AUTHORITY, "router"), key_file(new_authority(), "router")
    credentials = grpc.ssl_channel_credentials(
        ours.trusted_pem, theirs.private_key.encode(), theirs.certificate.encode()
    )
    assert not await answers(served.server.address, credentials), "a stranger who believes the worker"
    assert not await answers(served.server.address, grpc.ssl_channel_credentials(ours.trusted_pem)), "no certificate"
    assert await answers(served.server.address, channel_credentials(ours))


async def answers(address: str, credentials: grpc.ChannelCredentials) -> bool:
    async with grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True


async def test_a_router_does_not_believe_another_cluster(tmp_path: Path) -> None:
    """Nor a router that poses as a worker."""
    async with Served(tmp_path, new_authority()).running() as strange:
        assert not await strange.lets_in(key_file(AUTHORITY, "router"))


async def test_files_of_neighbouring_generations_fit_and_others_do_not(served: Served) -> None:
    """Whoever gets the new file first."""
    second = rotated(AUTHORITY)
    third = rotated(second)
    assert await served.lets_in(key_file(second, "router"))
    assert not await served.lets_in(key_file(third, "router"))
    served.take(second)
    for authority in (AUTHORITY, second, third):
        assert await served.lets_in(key_file(authority, "router"))
    served.take(third)
    assert not await served.lets_in(key_file(AUTHORITY, "router"))
    assert await served.lets_in(key_file(second, "router"))


async def test_a_router_shows_new_keys_as_soon_as_nobody_needs_the_connection(served: Served) -> None:
    second = rotated(AUTHORITY)
    third = rotated(second)
    keys = [key_file(AUTHORITY, "router")]
    worker = worker_at(served.server.address, keys)
    try:
        await worker.heartbeat(10)
        before = worker.channel
        with Dependence([worker]):
            keys[0] = key_file(second, "router")
            await worker.heartbeat(10)
            assert (worker.channel, worker.state) == (before, State.HEALTHY)
        await worker.heartbeat(10)
        assert worker.channel is not before
        served.take(second)
        served.take(third)
        assert not await served.lets_in(key_file(AUTHORITY, "router"))
        await worker.heartbeat(10)
        assert worker.state is State.HEALTHY
    finally:
        await worker.close()


async def test_health_checks_of_the_same_user_need_no_keys(served: Served, tmp_path: Path) -> None:
    socket = tmp_path / "ready.sock"
    assert socket.stat().st_mode & 0o777 == 0o600
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
