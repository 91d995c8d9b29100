"""Clients that leave, at every moment: both workers free everything, and nobody restarts."""

import asyncio
import json
import random
import socket
import struct

import aiohttp
import grpc
import psutil
import pytest

from common.engine.solo import SoloRunner
from common.pb import worker_pb2, worker_pb2_grpc
from tests.e2e.cluster import Client, Cluster, JsonObject, request_body, sse_events, until
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.test_routing_rows import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("disaggregated")]

#: Gauges must be back at their baseline this soon after the last client left: at once, on a busy machine too.
BASELINE_S = 30.0

Gauges = dict[str, float]

#: What `gauges` tells when nothing runs. An earlier request may still be on its way out when a test begins.
IDLE: Gauges = dict.fromkeys(("running", "waiting", "handoffs", "kv_blocks_used", "in_flight"), 0.0)


async def gauges(client: Client) -> Gauges:
    """Everything that a live request holds, summed over the cluster; a dead worker shows what it held last."""
    view = await client.json("/cluster")
    names = ("running", "waiting", "handoffs", "kv_blocks_used")
    alive = [worker for worker in view["workers"] if worker["state"] != "dead"]
    totals = {name: float(sum(worker[name] for worker in alive)) for name in names}
    return totals | {"in_flight": view["router"]["in_flight"]}


async def assert_baseline(client: Client, within_s: float = BASELINE_S) -> None:
    """The gauges return to `IDLE`; fails with the last reading."""
    last: Gauges = {}

    async def reached() -> bool:
        nonlocal last
        last = await gauges(client)
        return last == IDLE

    try:
        await until(reached, within_s)
    except TimeoutError:
        pytest.fail(f"after {within_s} s the gauges are {last}, not {IDLE}")


async def leave_early(client: Client, rng: random.Random) -> None:
    """One request whose socket is reset at a random moment: while connecting, queued, prefilled, streamed."""
    prompt = prompt_of(rng.randrange(1, 110), rng.randrange(1000))
    body = request_body(prompt, stream=rng.random() < 0.7, max_tokens=60, ignore_eos=True)
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        post = asyncio.create_task(_read(session, client.url, body))
        await asyncio.wait([post], timeout=rng.expovariate(1 / 0.05))
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)


async def _read(session: aiohttp.ClientSession, url: str, body: JsonObject) -> None:
    async with session.post(f"{url}/inference/v1/generate", json=body) as response:
        async for _ in sse_events(response):
            pass


async def test_clients_that_leave_free_both_workers(client: Client, solo: SoloRunner) -> None:
    """200 requests left at random moments. vllm-project/vllm#54947, #50425, ai-dynamo/dynamo#7489."""
    rng = random.Random(11)
    before = await client.json("/cluster")
    gate = asyncio.Semaphore(20)

    async def one() -> None:
        async with gate:
            await leave_early(client, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(one())
    await assert_baseline(client)
    after = await client.json("/cluster")
    assert [w["pid"] for w in before["workers"]] == [w["pid"] for w in after["workers"]]
    assert await invariants(client) == []
    answer = await client.generate([5, 6, 7], max_tokens=4)
    assert_equals_solo(answer, solo, [5, 6, 7], max_tokens=4)


async def invariants(client: Client) -> list[str]:
    """Violations that the workers find in themselves."""
    found: list[str] = []
    for worker in (await client.json("/cluster"))["workers"]:
        async with grpc.aio.insecure_channel(worker["address"]) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            reply = await stub.CheckInvariants(worker_pb2.CheckInvariantsRequest(), timeout=10)
            found += [f"{worker['id']}: {violation}" for violation in reply.violations]
    return found


async def test_reset_in_mid_stream(client: Client) -> None:
    """A TCP reset after three events frees the sequence."""
    host, port = client.url.removeprefix("http://").split(":")
    for _ in range(10):
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(request_body(prompt_of(5), stream=True, max_tokens=100, ignore_eos=True))
        head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode())
        for _ in range(3):
            await reader.readuntil(b"\n\n")
        raw = writer.get_extra_info("socket")
        # Linger of zero seconds: closing sends RST, not FIN.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    await assert_baseline(client)


@pytest.mark.slow
async def test_memory_stays_flat(client: Client) -> None:
    """vllm-project/vllm#54947: 500 clients that leave, after 100 to warm up; no process grows by more than 16 MiB."""
    rng = random.Random(13)
    pids = [worker["pid"] for worker in (await client.json("/cluster"))["workers"]]

    async def leave_many(count: int) -> list[int]:
        for _ in range(count // 10):
            await asyncio.gather(*(leave_early(client, rng) for _ in range(10)))
        return [psutil.Process(pid).memory_info().rss for pid in pids]

    before, after = await leave_many(100), await leave_many(500)
    for old, new in zip(before, after, strict=True):
        assert new - old < 16 * 2**20


async def test_live_cluster_is_untouched(client: Client, disaggregated: Cluster) -> None:
    """After all of the above the shared cluster is still the same process and whole."""
    assert disaggregated.process.poll() is None
    assert await invariants(client) == []
