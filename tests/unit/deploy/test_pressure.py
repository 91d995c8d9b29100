"""What `moerelay verify` tells of preemptions and prefix hits, read from metrics as they are scraped."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from common.errors import InternalError, NotFoundError
from deploy.client import ClusterClient
from deploy.verify.pressure import Pressure


def metrics(*samples: tuple[str, str, str, int]) -> str:
    """Prometheus text of (metric, role, worker, value)."""
    return "".join(f'moerelay_{name}{{role="{role}",worker="{worker}"}} {n}.0\n' for name, role, worker, n in samples)


HITS = "prefix_cache_hit_tokens_total"
BEFORE = metrics(
    ("preemptions_total", "prefill", "p", 0),
    ("preemptions_total", "decode", "d", 3),
    ("preemptions_swapped_total", "decode", "d", 3),
    (HITS, "prefill", "p", 16),
    (HITS, "decode", "d", 0),
)
AFTER = metrics(
    ("preemptions_total", "prefill", "p", 0),
    ("preemptions_total", "decode", "d", 40),
    ("preemptions_total", "decode", "e", 1),
    ("preemptions_swapped_total", "decode", "d", 30),
    (HITS, "prefill", "p", 528),
    (HITS, "prefill", "q", 32),
    (HITS, "decode", "d", 960),
)


def test_totals_of_all_workers_since_the_beginning() -> None:
    since = Pressure.of(AFTER).since(Pressure.of(BEFORE))
    assert str(since) == (
        "the cluster meanwhile: 38 preemptions; prompt tokens found in the prefix cache: 544 on prefill, 960 on decode"
    )


def test_one_worker_does_both() -> None:
    text = metrics(("preemptions_total", "both", "b", 1), (HITS, "both", "b", 48))
    assert str(Pressure.of(text)) == "the cluster meanwhile: 1 preemption; prompt tokens found in the prefix cache: 48"


def test_nobody_told_anything() -> None:
    assert str(Pressure.of("")) == "the cluster meanwhile: 0 preemptions; prompt tokens found in the prefix cache: 0"


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(InternalError, match="Prometheus"):
        Pressure.of("moerelay_preemptions_total{ 1")


@asynccontextmanager
async def client_of(response: web.Response) -> AsyncIterator[ClusterClient]:
    """A client of a router that answers /metrics so."""

    async def answer(_: web.Request) -> web.Response:
        return response

    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as server, ClusterClient(str(server.make_url("")).rstrip("/")) as client:
        yield client


async def test_it_is_scraped_from_the_router() -> None:
    async with client_of(web.Response(text=AFTER)) as client:
        assert (await Pressure.read(client)).preemptions == 41


async def test_a_router_that_refuses_is_an_error() -> None:
    refusal = {"error": {"message": "no such path", "type": "NotFoundError", "param": None, "code": 404}}
    async with client_of(web.json_response(refusal, status=404)) as client:
        with pytest.raises(NotFoundError, match="no such path"):
            await Pressure.read(client)
