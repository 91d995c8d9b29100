"""Router processes that are killed, while requests and scrapes go on."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.fakes.fake_workers import Script, expected_tokens
from tests.unit.router.cluster import GENERATE
from tests.unit.router.scrapes import nothing_falls
from tests.unit.router.test_processes import NUM_STREAMS, Routers, choices_of, live_streams, poll, routers, stream_body

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot share a port there")

NUM_SHORT = 10


async def answer_at_once(cluster: Routers) -> None:
    body = stream_body("") | {"stream": False, "request_id": None, "sampling_params": {"max_tokens": 1}}
    for _ in range(NUM_SHORT):
        assert (await cluster.post(GENERATE, body))[0] == 200


async def kill_under_streams(cluster: Routers, script: Script, index: int) -> int:
    """How many of the streams were answered, because they were not the victim's."""
    script.release.clear()
    answered = 0
    async with live_streams(cluster) as streams:
        victim = cluster.children()[index]
        os.kill(victim.pid, signal.SIGKILL)
        psutil.wait_procs([victim], 60)
        script.release.set()
        for first, response in streams:
            try:
                choices = await choices_of(first, response)
            except aiohttp.ClientPayloadError:
                continue
            assert [t for c in choices for t in c["token_ids"]] == expected_tokens([5, 6, 7], 4)
            answered += 1
    assert 0 < answered < NUM_STREAMS
    await cluster.worker.wait_idle()
    await poll(cluster.is_complete)
    return answered


async def test_counts_are_what_clients_got_whoever_was_killed(tmp_path: Path) -> None:
    """Requests that a process takes with it end in no count; their first tokens were counted before."""
    script, num_rounds, answered = Script(hold_after=1), 3, 0
    async with routers(tmp_path, script) as cluster:
        async with nothing_falls(cluster.http, cluster.url):
            for round_ in range(num_rounds):
                await answer_at_once(cluster)
                answered += await kill_under_streams(cluster, script, round_ % 2)
            await answer_at_once(cluster)
            short = NUM_SHORT * (num_rounds + 1)
            await poll(partial(cluster.has, "moerelay_router_requests_total", short + answered))
        for _ in range(8):
            assert await cluster.metric("moerelay_router_requests_total") == short + answered
            assert await cluster.metric("moerelay_generation_tokens_total") == short + 4 * answered
            assert await cluster.metric("moerelay_e2e_request_latency_seconds_count") == short + answered
            first_tokens = short + NUM_STREAMS * num_rounds
            assert await cluster.metric("moerelay_time_to_first_token_seconds_count") == first_tokens
            assert await cluster.metric("moerelay_router_in_flight") == 0
