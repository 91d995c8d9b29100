"""A worker whose engine ended by itself stops serving and says so."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.config import WorkerSettings
from common.errors import InternalError
from common.worker.lifecycle import Lifecycle
from common.worker.server import WorkerServer
from tests.e2e.cluster import until
from tests.ipv6 import needs_ipv6


async def test_a_dead_engine_ends_the_worker() -> None:
    server = WorkerServer(WorkerSettings(model="m"), Lifecycle())
    died = asyncio.Event()

    async def engine_ended() -> None:
        await died.wait()

    running = asyncio.create_task(server.run(["moerelay.v1.Worker"], engine_ended()))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "moerelay.v1.Worker"):
            request = health_pb2.HealthCheckRequest(service=service)
            reply = await stub.Check(request, wait_for_ready=True, timeout=60)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        died.set()
        with pytest.raises(InternalError, match="engine thread"):
            await asyncio.wait_for(running, 60)


async def test_health_follows_the_engine() -> None:
    server, died = WorkerServer(WorkerSettings(model="m"), Lifecycle()), asyncio.Event()
    complaints: list[str] = []
    server.complaint = lambda: next(iter(complaints), None)

    async def engine_ended() -> None:
        await died.wait()

    running = asyncio.create_task(server.run(["moerelay.v1.Worker"], engine_ended()))
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def serves() -> bool:
            request = health_pb2.HealthCheckRequest(service="moerelay.v1.Worker")
            reply = await stub.Check(request, wait_for_ready=True, timeout=60)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        async def suffers() -> bool:
            return not await serves()

        assert await serves()
        complaints.append("the engine has been busy with one step for 9 s")
        await until(suffers, 60)
        complaints.clear()
        await until(serves, 60)
        died.set()
        with pytest.raises(InternalError, match="engine thread"):
            await asyncio.wait_for(running, 60)


@needs_ipv6
async def test_the_address_of_an_ipv6_host_has_brackets() -> None:
    server = WorkerServer(WorkerSettings(model="m", host="::1"), Lifecycle())
    assert server.address.startswith("[::1]:")
    await server.grpc.stop(None)
