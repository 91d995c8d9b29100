"""Connections that a worker closes just as they are used again.

aiohttp#6138, #9138, sglang#8744: a pooled HTTP connection is closed by its server while a request is on its way to it.
Between router and workers there is no such pool: one HTTP/2 connection carries everything, heartbeats and the feed
keep it busy, and a server that closes one says up to which call it has taken them. So the nearest things are a worker
that closes idle connections and has neither, and one that closes connections all the time.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import grpc
import pytest

from common.pb import decode_pb2, decode_pb2_grpc, types_pb2, worker_pb2_grpc
from common.rpc import ErrorInterceptor, channel_options
from router.keys import FLEET
from router.worker_state import State
from tests.fakes.fake_workers import MAX_MESSAGE_BYTES, Context, FakeWorker, Script
from tests.unit.router.cluster import Cluster, over

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
#: Give or take a tenth, as gRPC draws it. Calls may end on a connection that has to go, the feed among them, which
#: lasts as long as the test.
AGE = {"grpc.max_connection_age_ms": 40, "grpc.max_connection_age_grace_ms": 600_000}
NUM_REQUESTS = 200
#: A connection without a call is closed after so long, and requests come that much earlier or later.
IDLE_S, MARGIN_S = 0.1, 0.05
#: Pairs of a client and a worker that send their part of the requests at the same time.
NUM_LANES = 5


class Remembering(FakeWorker):
    """Knows on how many connections its requests came."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(worker_id, types_pb2.ROLE_BOTH, Script())
        self.peers: set[str] = set()

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        self.peers.add(context.peer())
        await super().Generate(request, context)


@asynccontextmanager
async def closing(worker: FakeWorker, options: Mapping[str, int]) -> AsyncIterator[str]:
    """Serves the worker at the address that it gives; `options` say when connections are closed."""
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=[*channel_options(MAX_MESSAGE_BYTES), *options.items()]
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def send(cluster: Cluster) -> None:
    status, answer = await cluster.post(BODY)
    assert status == 200, answer


def assert_each_ran_once(worker: FakeWorker, num_requests: int) -> None:
    assert len(worker.decode_requests) == num_requests
    assert len({request.request_id for request in worker.decode_requests}) == num_requests


async def test_requests_at_every_age_of_a_connection() -> None:
    worker = Remembering("decode-0")
    async with closing(worker, AGE) as address, over([], [], decode=[address], heartbeat_interval_s=0.02) as cluster:
        for number in range(NUM_REQUESTS):
            await send(cluster)
            await asyncio.sleep(number % 10 / 1000)  # the load itself: requests at all ages
        assert cluster.app[FLEET].workers[0].state is State.HEALTHY
    assert_each_ran_once(worker, NUM_REQUESTS)
    assert len(worker.peers) > 5, "connections were closed in between"


@pytest.mark.parametrize("has_feed", [False, True])
async def test_requests_just_when_an_idle_connection_is_closed(has_feed: bool) -> None:
    """200 of them within 50 ms of the moment. With a feed, as every worker of ours has, no connection is ever idle."""
    workers = [Remembering("decode-0") for _ in range(NUM_LANES)]
    await asyncio.gather(*(lane(worker, number, has_feed=has_feed) for number, worker in enumerate(workers)))
    for worker in workers:
        if has_feed:
            assert len(worker.peers) == 1
        else:
            assert 1 < len(worker.peers) <= NUM_REQUESTS // NUM_LANES


async def lane(worker: Remembering, number: int, *, has_feed: bool) -> None:
    """One client's part of the requests."""
    worker.serves_feeds = has_feed
    chance, num_requests = random.Random(number), NUM_REQUESTS // NUM_LANES
    options = {"grpc.max_connection_idle_ms": int(1000 * IDLE_S)}
    settings = {"heartbeat_interval_s": 60, "heartbeat_timeout_s": 60}
    async with closing(worker, options) as address, over([], [], decode=[address], **settings) as cluster:
        for _ in range(num_requests):
            await send(cluster)
            await asyncio.sleep(IDLE_S + chance.uniform(-MARGIN_S, MARGIN_S))  # the load itself
    assert_each_ran_once(worker, num_requests)
