"""More connections than there can be: idle ones make room, and nothing is told more than once a second."""

import asyncio
import contextlib
import resource
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from common.config import RouterSettings
from router.connections import MAX_CONNECTIONS, Tally, max_connections
from router.keys import SETTINGS
from router.listener import JsonServer, create_runner

GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class Held:
    """What requests for /held wait for; `entered` has one for each that waits."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.entered = asyncio.Semaphore(0)


@asynccontextmanager
async def listening(most: int, held: Held) -> AsyncIterator[int]:
    """The port of an application with /live, and /held, which answers once it may."""

    async def live(request: web.Request) -> web.Response:
        return web.Response(text="live")

    async def wait(request: web.Request) -> web.Response:
        held.entered.release()
        await held.go.wait()
        return web.Response(text="held")

    app = web.Application()
    app[SETTINGS], app[MAX_CONNECTIONS] = RouterSettings(), most
    app.add_routes([web.get("/live", live), web.get("/held", wait)])
    runner = create_runner(app)
    await runner.setup()
    assert isinstance(runner.server, JsonServer)
    # The log is silent for a second at a time; a busy machine may stand still for longer.
    runner.server._tally._now = lambda: 0.0
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, text: bytes) -> None:
        self._writer.write(text)

    async def answer(self) -> bytes:
        """Its first line; empty if the connection was closed."""
        with contextlib.suppress(ConnectionError):
            return await self._reader.readline()
        return b""

    async def until_closed(self) -> None:
        while await self.answer():
            pass

    def close(self) -> None:
        self._writer.close()


async def connected(port: int, closing: contextlib.ExitStack) -> Client:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    closing.callback(client.close)
    return client


async def test_a_new_connection_takes_the_place_of_the_oldest_that_is_idle() -> None:
    async with listening(3, Held()) as port:
        with capture_logs() as logs, contextlib.ExitStack() as closing:
            clients: list[Client] = []
            for _ in range(8):
                clients.append(await connected(port, closing))
                clients[-1].send(GET % b"live")
                assert await clients[-1].answer() == b"HTTP/1.1 200 OK\r\n"
                clients[-1].send(b"GET /live HTT")  # half a request is none
                if len(clients) > 3:
                    await clients[-4].until_closed()
        assert [(entry["event"], entry["closed"]) for entry in logs] == [("too_many_connections", "an idle one")]


async def test_without_an_idle_one_the_new_one_is_refused() -> None:
    held = Held()
    async with listening(2, held) as port:
        with capture_logs() as logs, contextlib.ExitStack() as closing:
            busy = [await connected(port, closing) for _ in range(2)]
            for client in busy:
                client.send(GET % b"held")
                await held.entered.acquire()
            refused = await connected(port, closing)
            assert await refused.answer() == b"HTTP/1.1 503 Service Unavailable\r\n"
            held.go.set()
            assert [await client.answer() for client in busy] == [b"HTTP/1.1 200 OK\r\n"] * 2
        assert [(entry["event"], entry["closed"]) for entry in logs] == [("too_many_connections", "the new one")]


@pytest.mark.parametrize(("limit", "most"), [(1024, 960), (128, 64), (64, 16), (resource.RLIM_INFINITY, sys.maxsize)])
def test_the_limit_of_descriptors_bounds_connections(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert max_connections() == most


def test_a_tally_is_told_at_most_once_a_second() -> None:
    times = [10.0, 10.1, 10.9, 11.0, 11.5, 12.5]
    clock = iter(times)
    tally = Tally("much", "have less", lambda: next(clock))
    with capture_logs() as logs:
        for _ in times:
            tally.count(of="it")
    assert [(entry["number"], entry["of"]) for entry in logs] == [(1, "it"), (3, "it"), (2, "it")]


async def test_connections_without_a_descriptor_are_closed_and_told_once_a_second() -> None:
    """In a process of its own, which has none left: those that wait are closed, none is left waiting for ever."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", str(Path(__file__).with_name("no_descriptors.py")), stdout=PIPE, stderr=PIPE
    )
    said, complaints = await process.communicate()
    assert (said, complaints) == (b"50 False ['no_descriptor_for_connection'] 1 True\n", b"")
