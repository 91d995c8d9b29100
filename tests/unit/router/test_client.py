"""Clients that stop reading, and answers that are large."""

import asyncio
import json
import socket
import threading
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from router.client import MAX_WRITE_BYTES, ClientWriter
from router.keys import LIVE
from router.serve import THREAD_FROM_BYTES, encoded
from tests.fakes.fake_workers import Script, description
from tests.unit.router.cluster import GENERATE, all_opened, running

#: 30,000 rows of 384 bytes: more than the kernel buffers between two sockets.
LARGE = description(num_layers=48, top_k=8, num_experts=128, max_model_len=40_000)
PROMPT = [7] * 30_000


def post_bytes(body: Any) -> bytes:
    """A request as it stands on the wire."""
    text = json.dumps(body)
    return f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_stops_reading_holds_nothing_for_ever(stream: bool) -> None:
    """Its connection stays open; its request ends as if it had left."""
    options = {"stream": stream, "stream_options": {"routed_experts": "final"}}
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}} | options
    async with running(Script(LARGE), client_stall_timeout_s=0.2) as cluster:
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", int(cluster.url.rpartition(":")[2])))
            await loop.sock_sendall(client, post_bytes(body))
            assert (await loop.sock_recv(client, 12)) == b"HTTP/1.1 200"
            await asyncio.wait_for(cluster.app[LIVE].wait_empty(), 20)
        async with cluster.http.get("/metrics") as response:
            text = await response.text()
        assert 'moerelay_router_requests_total{endpoint="generate",outcome="client_left"} 1.0' in text
        await cluster.canary()


async def test_an_abort_of_what_its_worker_has_finished_does_not_wait_for_the_client() -> None:
    """The worker knows the request no more, because everything is on its way to a client that does not read."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}, "stream": True, "request_id": "mine"}
    async with running(Script(LARGE), both=True) as cluster:
        [decode] = cluster.decode
        await all_opened(cluster)
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", int(cluster.url.rpartition(":")[2])))
            await loop.sock_sendall(client, post_bytes(body))
            await loop.sock_recv(client, 12)
            await decode.wait_until(lambda: not decode.live)
            abort = cluster.post({"request_ids": ["mine"]}, "/inference/v1/abort_requests")
            assert (await asyncio.wait_for(abort, 20))[0] == 200
            assert cluster.app[LIVE].get("mine"), "its client has not got everything yet"
            assert len(decode.abort_requests) == 1
        await asyncio.wait_for(cluster.app[LIVE].wait_empty(), 20)


async def test_large_answers_reach_clients_that_read() -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
    async with running(Script(LARGE)) as cluster:
        status, answer = await cluster.post(body)
    assert status == 200
    assert len(answer["choices"][0]["routed_experts"]) == (128 + 30_001 * 384 + 2) // 3 * 4


async def test_large_answers_are_encoded_off_the_event_loop() -> None:
    threads: list[int] = []

    def encode() -> bytes:
        threads.append(threading.get_ident())
        return b"{}"

    assert await encoded(THREAD_FROM_BYTES - 1, encode) == b"{}"
    assert await encoded(THREAD_FROM_BYTES, encode) == b"{}"
    assert threads[0] == threading.get_ident() != threads[1]


class SlowTransport(asyncio.Transport):
    """Says what is unread each time it is looked at."""

    def __init__(self, unread_bytes: list[int]) -> None:
        super().__init__()
        self.unread_bytes = unread_bytes
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes.pop(0)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return 0, 0

    def abort(self) -> None:
        self.aborted.set()


class SlowResponse(web.StreamResponse):
    """Has no room until its client is disconnected."""

    def __init__(self, transport: SlowTransport) -> None:
        super().__init__()
        self._transport = transport

    @property
    def prepared(self) -> bool:
        return True

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        await self._transport.aborted.wait()


async def test_a_client_is_slow_as_long_as_it_reads_anything() -> None:
    transport = SlowTransport([10, 10, 9, 8, 1, 1, 0])
    request = make_mocked_request("GET", "/", transport=transport)
    await asyncio.wait_for(ClientWriter(request, SlowResponse(transport), 0.01).write(b"x" * 10), 10)
    assert transport.unread_bytes == [0]


class RefilledTransport(SlowTransport):
    """Each time it is looked at there is as much unread as before, because the client's next slice has come."""

    def __init__(self) -> None:
        super().__init__([])
        self.looked = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        self.looked.set()
        return 10


class RefillingResponse(web.StreamResponse):
    """Has room for a slice each time the client was looked at."""

    def __init__(self, transport: RefilledTransport) -> None:
        super().__init__()
        self._transport = transport
        self.num_slices = 0

    @property
    def prepared(self) -> bool:
        return True

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.looked.clear()
        await self._transport.looked.wait()
        self.num_slices += 1


async def test_a_client_that_takes_one_slice_after_the_other_is_not_stalled() -> None:
    transport = RefilledTransport()
    request = make_mocked_request("GET", "/", transport=transport)
    response = RefillingResponse(transport)
    await asyncio.wait_for(ClientWriter(request, response, 0.01).write(b"x" * (4 * MAX_WRITE_BYTES)), 10)
    assert response.num_slices == 4
    assert not transport.aborted.is_set()
