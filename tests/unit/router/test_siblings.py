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
from common.errors import WorkerLostError
from common.pb import types_pb2
from router.app import create_app
from router.errors import error_body
from router.json_body import read_bytes
from router.keys import FLEET
from router.listener import listening_for_siblings
from router.processes.local_app import create_local_app
from router.processes.siblings import Aborted, Siblings, socket_path
from tests.fakes.fake_workers import FakeWorker, Script, serving
from tests.unit.router.cluster import client_of

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
async def process_0_of(count: int, folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Speaks to a router process whose siblings are, or are not, in the folder."""
    async with (
        Siblings.in_directory(folder, 0, count, local_timeout_s=0.2, abort_timeout_s=0.2) as siblings,
        client_of(create_app(RouterSettings(), siblings)) as http,
    ):
        yield http


async def found_x(_: web.Request) -> web.Response:
    return web.Response(body=msgspec.json.encode(Aborted(["x"], {})))


REQUESTS = "moerelay_router_requests_total"


def counted(number: int) -> Handler:
    """A process that has had so many requests, and uses seven workers."""

    async def answer(_: web.Request) -> web.Response:
        requests = f'# TYPE {REQUESTS} counter\n{REQUESTS}{{outcome="finished"}} {number}\n'
        return web.Response(text=requests + "# TYPE moerelay_workers_usable gauge\nmoerelay_workers_usable 7\n")

    return answer


async def series_of(http: aiohttp.ClientSession, name: str) -> list[str]:
    async with http.get("/metrics") as response:
        assert response.status == 200
        return [line for line in (await response.text()).splitlines() if line.startswith(name)]


async def test_no_counter_falls_when_a_process_dies(tmp_path: Path) -> None:
    """Of a sum over all, Prometheus would take that for a restart, and what is left for an increase."""
    async with process_0_of(3, tmp_path) as http, answering(socket_path(tmp_path, 2), counted(50)):
        living = f'{REQUESTS}{{outcome="finished",process="2"}} 50.0'
        async with answering(socket_path(tmp_path, 1), counted(1000)):
            assert await series_of(http, REQUESTS) == [f'{REQUESTS}{{outcome="finished",process="1"}} 1000.0', living]
        assert await series_of(http, REQUESTS) == [living]
        async with answering(socket_path(tmp_path, 1), counted(1)):
            assert await series_of(http, REQUESTS) == [f'{REQUESTS}{{outcome="finished",process="1"}} 1.0', living]


async def test_what_all_processes_see_is_told_once(tmp_path: Path) -> None:
    async with process_0_of(2, tmp_path) as http, answering(socket_path(tmp_path, 1), counted(1)):
        assert await series_of(http, "moerelay_workers_usable") == ['moerelay_workers_usable{role="decode"} 0.0']
        [own] = await series_of(http, "process_start_time_seconds")
        assert own.startswith('process_start_time_seconds{process="0"} ')


async def test_a_process_that_is_silent_lacks_among_the_metrics(tmp_path: Path) -> None:
    async with silent(socket_path(tmp_path, 1)), process_0_of(2, tmp_path) as http:
        assert await series_of(http, "moerelay_router_processes") == ['moerelay_router_processes{process="0"} 1.0']


async def test_a_router_with_a_silent_process_is_not_ready(tmp_path: Path) -> None:
    """A share of the connections is its own."""
    worker = FakeWorker("both-0", types_pb2.ROLE_BOTH, Script())
    async with (
        serving(worker),
        Siblings.in_directory(tmp_path, 0, 2, local_timeout_s=0.2) as siblings,
    ):
        app = create_app(RouterSettings(decode=[worker.address], heartbeat_interval_s=0.05), siblings)
        async with client_of(app) as http:
            await app[FLEET].refresh()
            async with http.get("/ready") as response:
                assert response.status == 200
            async with silent(socket_path(tmp_path, 1)), http.get("/ready") as response:
                assert response.status == 503
                assert "1 did not answer in time" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (502, error_body(WorkerLostError("worker w went away")), "WorkerLostError", "worker w went away"),
        (500, b"Server got itself in trouble", "InternalServerError", "process 1 of this router failed: Server got"),
    ],
)
async def test_an_error_of_another_process_keeps_its_status_and_message(
    tmp_path: Path, status: int, body: bytes, kind: str, message: str
) -> None:
    async def fails(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async with (
        answering(socket_path(tmp_path, 1), fails),
        process_0_of(2, tmp_path) as http,
        http.post(ABORT, json={"request_ids": ["x"]}) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["type"]) == (status, kind)
    assert error["message"].startswith(message)


@pytest.mark.parametrize(
    ("path", "body"), [(ABORT, {"request_ids": ["x", "y"]}), ("/abort_request", {"abort_all": True})]
)
async def test_an_abort_that_fails_says_what_was_ended(tmp_path: Path, path: str, body: dict[str, object]) -> None:
    """Whoever tries again finds no request of that name."""

    async def half(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(Aborted([], {"y": ("WorkerLostError", "worker w went away")})))

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(answering(socket_path(tmp_path, 1), found_x))
        await stack.enter_async_context(answering(socket_path(tmp_path, 2), half))
        http = await stack.enter_async_context(process_0_of(3, tmp_path))
        async with http.post(path, json=body) as response:
            assert response.status == 502
            message = (await response.json())["error"]["message"]
    assert message == "y could not be ended: worker w went away; these were ended: x"


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
            return await siblings.forward(request, await read_bytes(request))

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
