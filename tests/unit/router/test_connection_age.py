"""Connections that a worker closes just as they are used again.

aiohttp#6138, #9138, sglang#8744: a pooled HTTP connection is closed by its server while a request is on its way to it.
Between router and workers there is no such pool: one HTTP/2 connection carries everything, heartbeats and the feed
keep it busy, and a server that closes one says up to which call it has taken them. So the nearest thing is a
worker that closes connections all the time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from common.pb import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2_grpc
from common.rpc import ErrorInterceptor, channel_options
from router.keys import FLEET
from router.worker_state import State
from tests.fakes.fake_workers import MAX_MESSAGE_BYTES, Context, FakeWorker, Script
from tests.unit.router.cluster import over

#: Give or take a tenth, as gRPC draws it.
AGE_MS = 40
NUM_REQUESTS = 120


class Remembering(FakeWorker):
    """Knows on how many connections its requests came."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id, types_pb2.ROLE_BOTH, Script())
        self.peers: set[str] = set()

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        self.peers.add(context.peer())
        await super().Generate(request, context)


@asynccontextmanager
async def ageing(worker: FakeWorker) -> AsyncIterator[str]:
    """Serves the worker at the address that it gives; no connection gets old, and calls may end on one that has to."""
    options = [("grpc.max_connection_age_ms", AGE_MS), ("grpc.max_connection_age_grace_ms", 10_000)]
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[*channel_options(MAX_MESSAGE_BYTES), *options])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def test_requests_at_every_age_of_a_connection() -> None:
    worker = Remembering("decode-0")
    async with ageing(worker) as address, over([], [], decode=[address], heartbeat_interval_s=0.02) as cluster:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
        for number in range(NUM_REQUESTS):
            status, answer = await cluster.post(body)
            assert status == 200, answer
            await asyncio.sleep(number % 10 / 1000)  # the load itself: requests at all ages
        assert cluster.app[FLEET].workers[0].state is State.HEALTHY
    assert len(worker.decode_requests) == NUM_REQUESTS
    assert len({request.request_id for request in worker.decode_requests}) == NUM_REQUESTS
    assert len(worker.peers) > 5, "connections were closed in between"
