"""Several router processes on one port are one router: whichever process answers."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from common.pb import types_pb2
from tests.e2e.cluster import PATIENT_ROUTER
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens, serving
from tests.unit.router.cluster import GENERATE, split_events, strict_json
from tests.unit.router.test_process import process

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot share a port there")

#: All on one of two processes once in 2^15 times.
NUM_STREAMS = 16
NAMES = [f"r-{i}" for i in range(NUM_STREAMS)]


async def poll(condition: Callable[[], Awaitable[bool]]) -> None:
    """Of what happens in other processes, which offer nothing to wait on."""
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def written(path: Path) -> bool:
    return path.exists()  # noqa: ASYNC240


@dataclass
class Routers:
    """A router of two processes over one fake worker; every request of `http` is a connection of its own."""

    parent: asyncio.subprocess.Process
    url: str
    http: aiohttp.ClientSession
    worker: FakeWorker

    def children(self) -> list[psutil.Process]:
        return [c for c in psutil.Process(self.parent.pid).children() if "router.processes" in c.cmdline()]

    async def json(self, path: str) -> dict[str, Any]:
        async with self.http.get(self.url + path) as response:
            answer: dict[str, Any] = strict_json(await response.text())
            return answer

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, strict_json(await response.text())

    async def metric(self, name: str) -> float:
        """Sum over the labels."""
        async with self.http.get(f"{self.url}/metrics") as response:
            found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", await response.text(), re.M)
        return sum(map(float, found))

    async def has(self, name: str, value: float) -> bool:
        """Metrics lag behind the last byte of a stream."""
        return await self.metric(name) == value

    async def is_ready(self) -> bool:
        async with self.http.get(f"{self.url}/ready") as response:
            return response.status == 200

    async def drains(self) -> bool:
        return bool((await self.json("/cluster"))["router"]["draining"])

    async def is_complete(self) -> bool:
        return bool((await self.json("/cluster"))["router"]["processes"] == 2)


@asynccontextmanager
async def routers(folder: Path, script: Script, *flags: str) -> AsyncIterator[Routers]:
    worker = FakeWorker("decode-0", types_pb2.ROLE_BOTH, script)
    async with (
        serving(worker),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as http,
    ):
        ready = str(folder / "ready.json")
        shared = ["--port", "0", "--router-processes", "2", "--decode", worker.address, "--ready-file", ready]
        async with process(*shared, *PATIENT_ROUTER, *flags) as parent:
            await poll(lambda: written(folder / "ready.json"))
            url = f"http://{json.loads((folder / 'ready.json').read_text())['address']}"
            cluster = Routers(parent, url, http, worker)
            await poll(cluster.is_ready)
            yield cluster


def stream_body(name: str) -> dict[str, Any]:
    sampling = {"max_tokens": 4, "temperature": 0}
    return {"token_ids": [5, 6, 7], "sampling_params": sampling, "stream": True, "request_id": name}


@asynccontextmanager
async def live_streams(cluster: Routers) -> AsyncIterator[list[tuple[bytes, aiohttp.ClientResponse]]]:
    """Streams that have sent their first event and wait for the script."""
    async with AsyncExitStack() as stack:
        posts = [cluster.http.post(cluster.url + GENERATE, json=stream_body(name)) for name in NAMES]
        responses = [await stack.enter_async_context(post) for post in posts]
        yield [(await response.content.readuntil(b"\n\n"), response) for response in responses]


async def choices_of(first: bytes, response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    events = split_events(first + await response.read())
    assert events[-1] == b"[DONE]"
    return [choice for event in events[:-1] for choice in strict_json(event.decode())["choices"]]


async def test_counts_add_up_and_aborts_reach_every_process(tmp_path: Path) -> None:
    async with routers(tmp_path, Script(hold_after=1)) as cluster:
        async with live_streams(cluster) as streams:
            port = int(cluster.url.rpartition(":")[2])
            served = [
                sum(c.status == psutil.CONN_ESTABLISHED and c.laddr[1] == port for c in child.net_connections("tcp"))
                for child in cluster.children()
            ]
            assert len(served) == 2
            assert min(served) > 0
            for _ in range(8):
                router = (await cluster.json("/cluster"))["router"]
                assert (router["in_flight"], router["processes"]) == (NUM_STREAMS, 2)
                assert await cluster.metric("moerelay_router_in_flight") == NUM_STREAMS
            status, answer = await cluster.post("/inference/v1/abort_requests", {"request_ids": [*NAMES, "unknown"]})
            assert (status, answer) == (200, {"aborted": NAMES, "unknown": ["unknown"]})
            for first, response in streams:
                assert (await choices_of(first, response))[-1]["finish_reason"] == "abort"
        await poll(partial(cluster.has, "moerelay_router_requests_total", NUM_STREAMS))
        assert await cluster.metric("moerelay_time_to_first_token_seconds_count") == NUM_STREAMS
        assert await cluster.metric("moerelay_worker_up") == 1
        status, _ = await cluster.post("/inference/v1/abort_requests", {"request_ids": ["unknown"]})
        assert status == 404


async def test_sglangs_aborts_reach_every_process(tmp_path: Path) -> None:
    async with routers(tmp_path, Script(hold_after=1)) as cluster, live_streams(cluster) as streams:
        assert (await cluster.post("/abort_request", {"rid": "unknown"}))[0] == 404
        assert await cluster.post("/abort_request", {"rid": NAMES[3]}) == (200, {"aborted": [NAMES[3]]})
        assert (await choices_of(*streams[3]))[-1]["finish_reason"] == "abort"
        await poll(partial(cluster.has, "moerelay_router_in_flight", NUM_STREAMS - 1))
        status, answer = await cluster.post("/abort_request", {"abort_all": True})
        assert (status, sorted(answer["aborted"])) == (200, sorted({*NAMES} - {NAMES[3]}))


async def test_control_holds_for_every_process_at_once(tmp_path: Path) -> None:
    """Heartbeats would tell the other process much later."""
    (tmp_path / "keys").write_text("secret\n")
    flags = ["--admin-on-public-port", "--admin-key-file", str(tmp_path / "keys"), "--heartbeat-interval-s", "30"]
    async with routers(tmp_path, Script(), *flags, "--admin-port", "0") as cluster:
        key = {"Authorization": "Bearer secret"}
        body = stream_body("x") | {"stream": False, "request_id": None}
        control = json.loads((tmp_path / "ready.json").read_text())["control_address"]
        for base in [cluster.url] * 4 + [f"http://{control}"]:
            assert (await cluster.http.post(f"{base}/pause?mode=keep")).status == 401
            assert (await cluster.http.post(f"{base}/pause?mode=keep", headers=key)).status == 200
            assert (await cluster.http.get(f"{base}/is_paused", headers=key)).status == 200
            assert {(await cluster.post(GENERATE, body))[0] for _ in range(6)} == {503}
            resumed = await cluster.http.post(f"{base}/resume", headers=key)
            assert (resumed.status, await resumed.json()) == (200, {"status": "resumed"})
            assert {(await cluster.post(GENERATE, body))[0] for _ in range(6)} == {200}
        async with cluster.http.post(f"{cluster.url}/pause?mode=never", headers=key) as wrong:
            assert (wrong.status, (await wrong.json())["error"]["param"]) == (400, "mode")


async def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async with routers(tmp_path, Script()) as cluster:
        before = cluster.children()
        victim = before[1]
        os.kill(victim.pid, signal.SIGKILL)
        psutil.wait_procs([victim], 60)
        await poll(cluster.is_complete)
        assert {c.pid for c in cluster.children()} > {before[0].pid}
        for _ in range(8):
            status, answer = await cluster.post(GENERATE, stream_body("x") | {"stream": False, "request_id": None})
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected_tokens([5, 6, 7], 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_all_processes_drain(tmp_path: Path, number: signal.Signals) -> None:
    script = Script(hold_after=1)
    async with routers(tmp_path, script) as cluster:
        async with live_streams(cluster) as streams:
            cluster.parent.send_signal(number)
            await poll(cluster.drains)
            assert (await cluster.http.get(f"{cluster.url}/ready")).status == 503
            script.release.set()
            for first, response in streams:
                choices = await choices_of(first, response)
                assert [t for c in choices for t in c["token_ids"]] == expected_tokens([5, 6, 7], 4)
        assert await asyncio.wait_for(cluster.parent.wait(), 60) == 0


async def test_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    async with routers(tmp_path, Script(hold_after=1)) as cluster, live_streams(cluster):
        children = cluster.children()
        cluster.parent.terminate()
        await poll(cluster.drains)
        cluster.parent.terminate()
        assert await asyncio.wait_for(cluster.parent.wait(), 60) == 0
        assert not [child for child in children if child.is_running()]


async def test_no_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    async with routers(tmp_path, Script()) as cluster:
        children = cluster.children()
        cluster.parent.kill()
        gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 60)
        assert (len(gone), alive) == (2, [])


async def test_what_keeps_the_processes_from_starting_is_told_once(tmp_path: Path) -> None:
    async with process("--router-processes", "3", "--port", "0", "--model", "/nonexistent/model") as child:
        _, err = await child.communicate()
    assert child.returncode == 2
    assert err.count(b"/nonexistent/model") == 1
    assert b"Traceback" not in err


async def test_a_taken_port_is_not_shared(tmp_path: Path) -> None:
    async with routers(tmp_path, Script()) as cluster:
        port = cluster.url.rpartition(":")[2]
        for count in ("1", "2"):
            async with process("--router-processes", count, "--port", port) as second:
                _, err = await second.communicate()
            assert second.returncode == 2
            assert b"cannot listen on 127.0.0.1" in err
