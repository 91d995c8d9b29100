"""`moerelay status`: what it shows of a cluster's answers."""

import json
from collections.abc import AsyncIterator
from io import StringIO
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from common.errors import UnavailableError
from deploy.cli import main
from deploy.client import ClusterClient
from deploy.status import Rates, Sample, lines, show


def worker(**changes: Any) -> dict[str, Any]:
    usual = {
        "id": "decode-0",
        "role": "decode",
        "address": "127.0.0.1:7002",
        "source": "127.0.0.1:7002",
        "state": "healthy",
        "refused": None,
        "running": 3,
        "waiting": 0,
        "handoffs": 1,
        "kv_blocks_used": 25,
        "kv_blocks_total": 100,
        "weight_version": "7",
        "pause": "running",
        "sleep_level": 0,
        "exact": True,
    }
    return usual | changes


def unheard() -> dict[str, Any]:
    address = "host:7001"
    known = {"id": address, "address": address, "source": address, "role": "prefill", "state": "dead"}
    return dict.fromkeys(worker()) | known


def cluster(*workers: dict[str, Any], **router: Any) -> dict[str, Any]:
    usual = {"in_flight": 3, "draining": False, "ready": True, "fallback": False, "model": "m"}
    return {"router": usual | router, "workers": list(workers)}


RATES = Rates(2.0, 100.4, 50.0, 0.0)


def shown(view: dict[str, Any]) -> list[str]:
    return [line.plain for line in lines(view, RATES)]


def test_a_line_per_worker() -> None:
    title, rates, head, *rows = shown(cluster(worker(), unheard()))
    assert title == "m: ready, 3 requests in flight"
    assert rates == "2.0 requests/s, 100 prompt and 50 generated tokens/s, 0.0 errors/s"
    assert head.split() == [
        "worker",
        "role",
        "state",
        "running",
        "waiting",
        "handoffs",
        "KV",
        "used",
        "weights",
        "note",
    ]
    assert [row.split() for row in rows] == [
        ["decode-0", "decode", "healthy", "3", "0", "1", "25%", "7"],
        ["host:7001", "prefill", "dead", "-", "-", "-", "-", "-"],
    ]
    assert len({row.index(word) for row, word in zip(rows, ("healthy", "dead"), strict=True)}) == 1


@pytest.mark.parametrize(
    ("worker_id", "source", "name"),
    [
        ("decode-172.18.0.4:7002", "dns://pool-a.example:7002", "pool-a.example (172.18.0.4:7002)"),
        ("172.18.0.4:7002", "dns://pool-a:7002", "pool-a (172.18.0.4:7002)"),
        ("decode-172.18.0.4:7002", "file:///run/decode.txt", "decode-172.18.0.4:7002"),
        ("decode-172.18.0.4:7002", "172.18.0.4:7002", "decode-172.18.0.4:7002"),
        ("large-1", "dns://pool-a:7002", "large-1"),
    ],
    ids=["found-by-name", "unheard", "in-a-file", "address", "named-by-its-flag"],
)
def test_a_name_that_an_address_was_found_under(worker_id: str, source: str, name: str) -> None:
    *_, row = shown(cluster(worker(id=worker_id, address="172.18.0.4:7002", source=source)))
    assert row.startswith(f"{name}  decode")


def test_what_is_not_as_usual() -> None:
    odd = worker(refused="other weights", pause="paused", sleep_level=2, exact=False)
    title, fix, _, _, row = shown(cluster(odd, ready=False, draining=True, fallback=True))
    assert title == "m: not ready, draining, fallback, 3 requests in flight"
    assert fix == "asleep: POST /wake_up on the control port"
    assert row.endswith("other weights, paused, asleep at level 2, not exact")


def test_how_a_paused_cluster_goes_on() -> None:
    assert shown(cluster(worker(pause="paused"), unheard()))[1] == "paused: POST /resume on the control port"
    # One that is on its way there goes on with the same call, but is not worth a word yet.
    assert shown(cluster(worker(pause="pausing")))[1].startswith("2.0 requests/s")


def test_rates_of_counters_and_of_those_that_began_anew() -> None:
    names = ("moerelay_router_requests_total", "moerelay_generation_tokens_total")
    before = Sample(10.0, {}, dict(zip(names, (100.0, 5000.0), strict=True)))
    after = Sample(12.0, {}, dict(zip(names, (110.0, 40.0), strict=True)))
    assert Rates.between(before, after) == Rates(5.0, 0.0, 0.0, 0.0)


@pytest.fixture
async def router() -> AsyncIterator[TestServer]:
    """Counts one more request, of either outcome, each time that it is asked."""
    num_asked = 0

    async def answer_metrics(_: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        samples = [f'moerelay_router_requests_total{{outcome="{o}"}} {num_asked}' for o in ("finished", "error")]
        return web.Response(text="\n".join(["# TYPE moerelay_router_requests_total counter", *samples, ""]))

    async def answer_cluster(_: web.Request) -> web.Response:
        return web.json_response(cluster(worker(), ready=False))

    app = web.Application()
    app.add_routes([web.get("/metrics", answer_metrics), web.get("/cluster", answer_cluster)])
    server = TestServer(app)
    await server.start_server()
    yield server
    await server.close()


async def test_a_pipe_gets_no_colours_and_programs_get_json(router: TestServer) -> None:
    url = str(router.make_url("")).rstrip("/")
    text, wire = StringIO(), StringIO()
    # Exit code 1: the cluster is not ready.
    assert await show(ClusterClient(url), Console(file=text), 0.01, False, False) == 1
    assert "decode-0" in text.getvalue()
    assert "\x1b" not in text.getvalue()
    assert await show(ClusterClient(url), Console(file=wire), 0.01, False, True) == 1
    told = json.loads(wire.getvalue())
    assert told["workers"][0]["id"] == "decode-0"
    assert told["rates"]["requests_per_s"] > 0


async def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for no_color, expected in ((False, True), (True, False)):
        file = StringIO()
        console = Console(file=file, force_terminal=True, no_color=no_color, color_system="standard")
        for line in lines(cluster(worker()), RATES):
            console.print(line)
        assert ("\x1b[32m" in file.getvalue()) is expected


async def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(UnavailableError, match="nothing answers"):
        await show(ClusterClient("http://127.0.0.1:9"), Console(file=StringIO()), 0.01, False, False)


def test_intervals_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--interval", "0"]) == 2
    assert "must be more than 0" in capsys.readouterr().err
