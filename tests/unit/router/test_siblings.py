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
from router.processes.counter_memory import PART_BYTES, CounterMemory
from router.processes.local_app import create_local_app
from router.processes.siblings import Aborted, Siblings, socket_path
from tests.fakes.fake_workers import FakeWorker, Script, serving
from tests.unit.router.cluster import PATIENT, client_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Labels and value of a sample.
Reading = tuple[dict[str, str], float]

ABORT = "/inference/v1/abort_requests"

#: Of processes that answer, however long a busy machine stands still.
PATIENT_S = 60.0
#: Of processes that do not.
SHORT_S = 0.2


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
async def process_0_of(count: int, folder: Path, timeout_s: float = PATIENT_S) -> AsyncIterator[aiohttp.ClientSession]:
    """Speaks to a router process whose siblings are, or are not, in the folder."""
    async with (
        Siblings.in_directory(folder, 0, count, local_timeout_s=timeout_s, abort_timeout_s=timeout_s) as siblings,
        client_of(create_app(RouterSettings(), siblings)) as http,
    ):
        yield http


async def found_x(_: web.Request) -> web.Response:
    return web.Response(body=msgspec.json.encode(Aborted(["x"], {})))


def gauges(**families: Reading) -> Handler:
    """A process with one sample of each of these."""

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/gauges"
        return web.Response(body=msgspec.json.encode({name: [sample] for name, sample in families.items()}))

    return answer


async def series_of(http: aiohttp.ClientSession, name: str) -> list[str]:
    async with http.get("/metrics") as response:
        assert response.status == 200
        return [line for line in (await response.text()).splitlines() if line.startswith(name)]


async def test_gauges_are_those_of_all_processes(tmp_path: Path) -> None:
    """A worker that one of them cannot use takes no part of the requests; a family of another version is left out."""
    busy = gauges(moerelay_router_in_flight=({}, 5), moerelay_workers_usable=({"role": "decode"}, 7))
    with_worker = gauges(moerelay_worker_up=({"role": "decode", "worker": "d"}, 1), moerelay_of_the_future=({}, 1))
    async with (
        answering(socket_path(tmp_path, 1), busy),
        answering(socket_path(tmp_path, 2), with_worker),
        process_0_of(3, tmp_path) as http,
    ):
        assert await series_of(http, "moerelay_router_in_flight") == ["moerelay_router_in_flight 5.0"]
        assert await series_of(http, "moerelay_workers_usable") == ['moerelay_workers_usable{role="decode"} 0.0']
        assert await series_of(http, "moerelay_worker_up") == ['moerelay_worker_up{role="decode",worker="d"} 1.0']
        assert await series_of(http, "moerelay_of_the_future") == []


async def test_what_a_process_says_of_itself_and_what_it_counts_reaches_the_other(tmp_path: Path) -> None:
    """Two whole applications: the port's metrics are the same from both of them."""
    memory = memoryview(bytearray(2 * PART_BYTES))
    async with AsyncExitStack() as stack:
        clients = []
        for index in (0, 1):
            opening = Siblings.in_directory(tmp_path, index, 2, local_timeout_s=PATIENT_S)
            siblings = await stack.enter_async_context(opening)
            app = create_app(RouterSettings(), siblings, CounterMemory(memory, index, 2))
            clients.append(await stack.enter_async_context(client_of(app)))
            local = listening_for_siblings(create_local_app(app), socket_path(tmp_path, index))
            await stack.enter_async_context(local)
        for http, number in zip(clients, (2, 3), strict=True):
            for _ in range(number):
                async with http.post("/inference/v1/generate", json={}) as response:
                    assert response.status == 400
        for http in clients:
            [failed] = [
                line
                for line in await series_of(http, "moerelay_router_requests_total")
                if 'endpoint="generate",outcome="error"' in line
            ]
            assert failed.split()[-1] == "5.0"
            assert await series_of(http, "moerelay_router_processes") == ["moerelay_router_processes 2.0"]


async def test_a_process_that_is_silent_lacks_among_the_gauges(tmp_path: Path) -> None:
    async with silent(socket_path(tmp_path, 1)), process_0_of(2, tmp_path, SHORT_S) as http:
        assert await series_of(http, "moerelay_router_processes") == ["moerelay_router_processes 1.0"]


async def test_a_router_with_a_silent_process_is_not_ready(tmp_path: Path) -> None:
    """A share of the connections is its own."""
    worker = FakeWorker("both-0", types_pb2.ROLE_BOTH, Script())
    async with (
        serving(worker),
        Siblings.in_directory(tmp_path, 0, 2, local_timeout_s=SHORT_S) as siblings,
    ):
        app = create_app(RouterSettings(decode=[worker.address], heartbeat_interval_s=0.05, **PATIENT), siblings)
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
        process_0_of(2, tmp_path, SHORT_S) as http,
        http.post(path, json=body) as response,
    ):
        assert response.status == 503


async def test_what_is_found_needs_no_other_process(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(silent(socket_path(tmp_path, 1)))
        await stack.enter_async_context(answering(socket_path(tmp_path, 2), found_x))
        # Both have the same time, of which the one that answers may need some on a busy machine.
        http = await stack.enter_async_context(process_0_of(3, tmp_path, 2.0))
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
