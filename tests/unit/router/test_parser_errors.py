"""Bytes that are hardly HTTP, large headers, bodies that come slowly: answered in JSON, the next client served."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.unit.router.cluster import GENERATE, Cluster, running, strict_json

BODY = b'{"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}'
HEAD = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\n".encode()


@asynccontextmanager
async def connection(cluster: Cluster) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Status, headers in lower case, JSON."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    assert headers["content-type"].startswith("application/json"), head
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, strict_json(body.decode())


async def exchange(cluster: Cluster, request: bytes) -> tuple[int, dict[str, str], Any]:
    async with connection(cluster) as (reader, writer):
        writer.write(request)
        return await read_answer(reader)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 8,  # how TLS greets
        b"GET /live HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x00b\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\rb\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n",
    ],
)
async def test_what_is_not_http_gets_json(request_bytes: bytes) -> None:
    async with running() as cluster:
        async with connection(cluster) as (reader, writer):
            writer.write(request_bytes)
            status, _, answer = await read_answer(reader)
            assert await asyncio.wait_for(reader.read(), 30) == b""
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (400, "BadRequestError", 400)
        assert len(answer["error"]["message"]) < 300
        await cluster.canary()


async def test_all_headers_together_are_bounded() -> None:
    async with running(max_header_bytes=2000) as cluster:
        lines = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 400) for i in range(6))
        status, _, answer = await exchange(cluster, b"GET /live HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        assert status == 400
        assert "--max-header-bytes" in answer["error"]["message"]
        assert (await exchange(cluster, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200


async def test_request_ids_of_ten_kilobytes_are_not_repeated() -> None:
    async with running() as cluster:
        for value in (b"x" * 10_000, b"\xc3\xa9l\xc3\xa8ve", b"\xe9l\xe8ve", b"a%0d%0aX-Evil: 1"):
            length = f"Content-Length: {len(BODY)}\r\n\r\n".encode()
            status, headers, answer = await exchange(
                cluster, HEAD + b"X-Request-Id: " + value + b"\r\n" + length + BODY
            )
            assert (status, answer["error"]["param"]) == (400, "request_id")
            assert value.decode("latin-1") not in str(headers) + str(answer)
        await cluster.canary()


async def test_bodies_that_stop_arriving() -> None:
    async with running(body_timeout_s=0.2) as cluster:
        for request in (
            HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY[:10],
            HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"tok\r\n',
        ):
            status, _, answer = await exchange(cluster, request)
            assert (status, answer["error"]["type"]) == (408, "RequestTimeoutError")
            assert "--body-timeout-s" in answer["error"]["message"]
        await cluster.canary()


async def test_chunked_bodies() -> None:
    async with running() as cluster:
        parts = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))
        status, _, answer = await exchange(cluster, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + parts + b"0\r\n\r\n")
        assert (status, len(answer["choices"][0]["token_ids"])) == (200, 2)
        status, _, answer = await exchange(cluster, HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nno number\r\n")
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
        await cluster.canary()


async def test_expect_continue() -> None:
    length = f"Content-Length: {len(BODY)}\r\n\r\n".encode()
    async with running() as cluster, connection(cluster) as (reader, writer):
        writer.write(HEAD + b"Expect: 100-continue\r\n" + length)
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await read_answer(reader))[0] == 200


async def test_bodies_that_are_too_large_are_not_asked_for() -> None:
    async with running(max_body_bytes=1000) as cluster:
        request = HEAD + b"Expect: 100-continue\r\nContent-Length: 5000\r\n\r\n"
        status, _, answer = await exchange(cluster, request)
        assert (status, answer["error"]["type"]) == (413, "RequestTooLargeError")


async def test_other_expectations() -> None:
    async with running() as cluster:
        for path in ("/live", "/nowhere"):
            status, _, _ = await exchange(cluster, f"GET {path} HTTP/1.1\r\nHost: x\r\nExpect: tea\r\n\r\n".encode())
            assert status == (200 if path == "/live" else 417)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/live", 200),
        ("HEAD", GENERATE, 405),
        ("PUT", "/live", 405),
        ("OPTIONS", "/live", 405),
        ("PATCH", "/live", 405),
    ],
)
async def test_methods(method: str, path: str, status: int) -> None:
    async with running() as cluster, cluster.http.request(method, path) as response:
        assert (response.status, response.headers["Content-Type"].split(";")[0]) == (status, "application/json")
        if status == 405:
            assert response.headers["Allow"] == ("POST" if path == GENERATE else "GET,HEAD")
