"""What router processes tell each other, and what a client hears when one of them does not answer."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from common.config import RouterSettings
from router.app import create_app
from router.listener import create_runner, listening_for_siblings
from router.processes.local_app import create_local_app
from router.processes.siblings import Aborted, Siblings, socket_path

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ABORT = "/inference/v1/abort_requests"


@asynccontextmanager
async def silent(path: Path) -> AsyncIterator[None]:
    """A process that is there and answers nothing."""
    released = asyncio.Event()

    async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await released.wait()
        writer.close()

    async with await asyncio.start_unix_server(hold, path):
        yield
        released.set()


@asynccontextmanager
async def answering(path: Path, handler: Handler) -> AsyncIterator[None]:
    """A process that answers everything with `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(app: web.Application) -> AsyncIterator[aiohttp.ClientSession]:
    runner = create_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as http:
            yield http
    finally:
        await runner.cleanup()


@asynccontextmanager
async def process_0_of(count: int, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Speaks to a router process whose siblings are, or are not, in the folder."""
    async with (
        Siblings.in_directory(folder, 0, count, local_timeout_s=0.2, abort_timeout_s=0.2) as siblings,
        client_of(create_app(RouterSettings(), siblings)) as http,
    ):
        yield http


async def found_x(_: web.Request) -> web.Response:
    return web.Response(body=msgspec.json.encode(Aborted(["x"])))


async def test_a_sum_without_a_process_that_exists_is_not_told(tmp_path: Path) -> None:
    """To Prometheus it would be a restart, and the next one an increase."""
    async with silent(socket_path(tmp_path, 1)), process_0_of(2, tmp_path) as http, http.get("/metrics") as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert "did not answer" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [(ABORT, {"request_ids": ["x"]}), ("/abort_request", {"rid": "x"}), ("/abort_request", {"abort_all": True})],
)
async def test_what_may_be_live_elsewhere_is_not_called_unknown(
    tmp_path: Path, path: str, body: dict[str, object]
) -> None:
    async with (
        silent(socket_path(tmp_path, 1)),
        process_0_of(2, tmp_path) as http,
        http.post(path, json=body) as response,
    ):
        assert response.status == 503


async def test_what_is_found_needs_no_other_process(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(silent(socket_path(tmp_path, 1)))
        await stack.enter_async_context(answering(socket_path(tmp_path, 2), found_x))
        http = await stack.enter_async_context(process_0_of(3, tmp_path))
        async with http.post(ABORT, json={"request_ids": ["x"]}) as response:
            assert (response.status, await response.json()) == (200, {"aborted": ["x"], "unknown": []})
        async with http.post("/abort_request", json={"rid": "x"}) as response:
            assert (response.status, await response.json()) == (200, {"aborted": ["x"]})


async def test_a_process_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    """Neither one that has not begun, nor one that has died and left its socket's name."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path(tmp_path, 1)))
    async with process_0_of(3, tmp_path) as http:
        async with http.get("/metrics") as response:
            assert response.status == 200
        async with http.post(ABORT, json={"request_ids": ["x"]}) as response:
            assert response.status == 404


async def test_what_is_handed_on_keeps_its_headers_and_its_content(tmp_path: Path) -> None:
    """On the way there and back."""

    async def process_0(request: web.Request) -> web.Response:
        assert await request.read() == b'{"mode": "keep"}'
        headers = {"Retry-After": "7", "X-Seen": request.headers["X-Sent"], "Content-Encoding": "gzip"}
        return web.Response(status=503, body=gzip.compress(b"{}" * 100), headers=headers, content_type="text/x")

    async with (
        answering(socket_path(tmp_path, 0), process_0),
        Siblings.in_directory(tmp_path, 1, 2) as siblings,
    ):

        async def hand_on(request: web.Request) -> web.Response:
            return await siblings.forward(request, await request.read())

        app = create_app(RouterSettings(), siblings)
        app.router.add_post("/handed-on", hand_on)
        async with client_of(app) as http:
            sent = {"Content-Encoding": "gzip", "X-Sent": "yes"}
            zipped = gzip.compress(b'{"mode": "keep"}')
            async with http.post("/handed-on", data=zipped, headers=sent) as response:
                assert (response.status, await response.read()) == (503, b"{}" * 100)
                assert response.headers.getall("Content-Type") == ["text/x"]
                assert (response.headers["Retry-After"], response.headers["X-Seen"]) == ("7", "yes")


async def test_headers_may_be_as_large_as_on_the_port_that_hands_them_on(tmp_path: Path) -> None:
    path = socket_path(tmp_path, 0)
    public = create_app(RouterSettings())
    async with (
        client_of(public),
        listening_for_siblings(create_local_app(public), path),
        aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(path))) as http,
    ):
        async with http.get("/state", headers={"X-Large": "x" * 20_000}) as response:
            assert response.status == 200
        async with http.get("/state", headers={"X-Large": "x" * 100_000}) as response:
            assert response.status == 400
            assert "--max-header-bytes" in (await response.json())["error"]["message"]
