"""Whole requests without a handoff, where no prefill worker is healthy."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.config import RouterSettings
from common.pb import decode_pb2, types_pb2, worker_pb2
from router.fleet import Fleet
from router.keys import FLEET
from router.worker import Worker
from tests.fakes.fake_workers import FakeWorker, Script, description, expected_tokens, serving
from tests.ports import reserved_address
from tests.unit.router.cluster import HEARTBEAT_S, Cluster, over, running
from tests.unit.router.fallbacks import MortalPrefill, fallbacks, leave, says
from tests.unit.router.test_failures import assert_nothing_left

PREFILL, DECODE, BOTH = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_BOTH
REMOTE, LOCAL = decode_pb2.PREFILL_SITE_REMOTE, decode_pb2.PREFILL_SITE_LOCAL

PROMPT = [5, 6, 7]
BODY: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}, "request_id": "mine"}

#: The fakes do not look at it.
NO_CONTEXT: Any = None


def sites(worker: FakeWorker) -> list[int]:
    return [request.prefill_site for request in worker.decode_requests]


async def test_without_the_flag_nothing_changes() -> None:
    async with running(prefill=0) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        assert [(await cluster.get(path))[0] for path in ("/ready", "/health")] == [503, 503]
        _, view = await cluster.get("/cluster")
        assert (view["router"]["ready"], view["router"]["fallback"]) == (False, False)
        assert await fallbacks(cluster) == 0
        assert cluster.decode[0].decode_requests == []


async def test_decode_workers_take_whole_requests() -> None:
    async with running(prefill=0, decode=2, allow_aggregated_fallback=True, heartbeat_interval_s=60) as cluster:
        assert await says(cluster) == (True, True, True)
        await cluster.canary()
        status, answer = await cluster.post(BODY | {"sampling_params": {"max_tokens": 4, "n": 2}})
        assert status == 200
        assert [choice["token_ids"] for choice in answer["choices"]] == [
            expected_tokens(PROMPT, 4, choice) for choice in range(2)
        ]
        assert [sites(worker) for worker in cluster.decode] == [[LOCAL], [LOCAL]]
        assert await fallbacks(cluster) == 2
        async with cluster.http.get("/health_generate") as response:
            assert response.status == 200
        assert await fallbacks(cluster) == 2  # a probe is no request
        await assert_nothing_left(cluster)


async def test_a_prefill_worker_that_comes_back_is_used_again() -> None:
    script = Script()
    prefill, decode = FakeWorker("prefill-0", PREFILL, script), FakeWorker("decode-0", DECODE, script)
    with reserved_address() as address, capture_logs() as logs:
        async with over([], [decode], prefill=[address], allow_aggregated_fallback=True) as cluster:
            await cluster.canary()
            assert await says(cluster) == (True, True, True)
            async with serving(prefill, address):
                while cluster.app[FLEET].falls_back():
                    await cluster.until_settled()
                    cluster.app[FLEET].review()
                await cluster.canary()
                assert (await says(cluster), await fallbacks(cluster)) == ((False, False, False), 1)
                assert (len(prefill.prefill_requests), sites(decode)) == (1, [LOCAL, REMOTE])
            while not cluster.app[FLEET].falls_back():
                await cluster.until_settled()
            cluster.app[FLEET].review()
            await cluster.canary()
            assert await fallbacks(cluster) == 2
    told = [(entry["event"], entry["log_level"]) for entry in logs if "fallback" in entry["event"]]
    began, over_ = ("aggregated_fallback", "warning"), ("aggregated_fallback_over", "info")
    assert told == [began, over_, began]


async def test_nobody_falls_back_before_every_prefill_worker_has_been_asked() -> None:
    """A cluster whose parts start at the same time: decode answers first."""
    script = Script()
    prefill, decode = FakeWorker("prefill-0", PREFILL, script), FakeWorker("decode-0", DECODE, script)
    async with serving(prefill), serving(decode):
        settings = RouterSettings(
            prefill=[prefill.address], decode=[decode.address], allow_aggregated_fallback=True, model=None
        )
        fleet = Fleet(settings)
        first, second = fleet.workers
        assert (first.side, second.side) == ("prefill", "decode")
        await second.heartbeat(HEARTBEAT_S)
        fleet.review()
        assert (second.usable, fleet.falls_back(), fleet.can_serve()) == (True, False, False)
        await first.heartbeat(HEARTBEAT_S)
        fleet.review()
        assert (fleet.falls_back(), fleet.can_serve()) == (False, True)
        for worker in fleet.workers:
            await worker.close()


@pytest.mark.parametrize("why", ["misfit", "draining"])
async def test_prefill_workers_that_live_but_cannot_be_used(why: str) -> None:
    model = description(dtype="bfloat16") if why == "misfit" else description()
    prefill = FakeWorker("prefill-0", PREFILL, Script(model))
    prefill.draining = why == "draining"
    async with over([prefill], [FakeWorker("decode-0", DECODE, Script())], allow_aggregated_fallback=True) as cluster:
        assert await says(cluster) == (True, True, True)
        await cluster.canary()
        assert (prefill.prefill_requests, await fallbacks(cluster)) == ([], 1)


async def test_a_pause_is_no_reason_to_fall_back() -> None:
    """A decode worker that came up in a pause is not paused, but the cluster is."""
    async with running(allow_aggregated_fallback=True) as cluster:
        await cluster.prefill[0].Pause(worker_pb2.PauseRequest(mode=worker_pb2.PAUSE_MODE_KEEP), NO_CONTEXT)
        await cluster.until_settled()
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["type"]) == (503, "PausedError")
        assert (await cluster.get("/ready"))[0] == 503
        assert (await cluster.get("/health"))[1]["fallback"] is False
        await cluster.prefill[0].Resume(worker_pb2.ResumeRequest(), NO_CONTEXT)
        await cluster.until_settled()
        await cluster.canary()
        assert await fallbacks(cluster) == 0


async def test_a_worker_of_role_both_never_falls_back() -> None:
    script = Script()
    decodes = [FakeWorker("decode-0", BOTH, script), FakeWorker("decode-1", DECODE, script)]
    async with over([], decodes[:1], allow_aggregated_fallback=True) as cluster:
        await cluster.canary()
        assert (await says(cluster), await fallbacks(cluster)) == ((False, False, False), 0)
    async with over([], decodes, allow_aggregated_fallback=True, heartbeat_interval_s=60) as cluster:
        assert await says(cluster) == (True, True, True)
        for _ in range(4):  # they take turns
            await cluster.canary()
        assert await fallbacks(cluster) == 2


async def test_a_prefill_worker_that_just_left_is_done_without() -> None:
    """No heartbeat has missed it yet; the request finds out before it was sent anywhere."""
    async with MortalPrefill(Script(), allow_aggregated_fallback=True) as (cluster, server):
        await leave(cluster, server)
        assert await says(cluster) == (False, False, False)
        await cluster.canary()
        assert (await says(cluster), await fallbacks(cluster)) == ((True, True, True), 1)
    async with MortalPrefill(Script()) as (cluster, server):
        await leave(cluster, server)
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["message"]) == (503, "worker prefill-0 accepts no connection")


async def test_another_prefill_worker_goes_before_the_fallback() -> None:
    script = Script()
    async with serving(FakeWorker("prefill-1", PREFILL, script)) as other:
        mortal = MortalPrefill(script, prefill=[other.address], allow_aggregated_fallback=True)
        async with mortal as (cluster, server):
            await leave(cluster, server)
            for _ in range(3):
                await cluster.canary()
            assert (len(other.prefill_requests), await fallbacks(cluster)) == (3, 0)


class FlappingWorker(Worker):
    """Whoever finds it gone is contradicted by a heartbeat before anybody else is placed."""

    def suspect(self) -> None:
        """It is healthy again already."""

    async def heartbeat(self, timeout_s: float) -> None:
        """Every one is answered."""


def flap(cluster: Cluster) -> None:
    """Makes the router's first worker a flapping one."""
    cluster.app[FLEET].workers[0].__class__ = FlappingWorker


async def test_a_prefill_worker_that_flaps_holds_no_request_for_ever() -> None:
    async with MortalPrefill(Script(), allow_aggregated_fallback=True) as (cluster, server):
        flap(cluster)
        await leave(cluster, server)
        async with asyncio.timeout(10):
            await cluster.canary()
        assert (await says(cluster), await fallbacks(cluster)) == ((False, False, False), 1)


async def test_a_busy_prefill_worker_goes_before_the_fallback_too() -> None:
    # Decode does not wait for the handoff by itself, and the prefill call would be late on a busy machine.
    script = Script(hold_after=0)
    busy = FakeWorker("prefill-1", PREFILL, script)
    busy.live["of another router"] = asyncio.Event()
    async with serving(busy):
        mortal = MortalPrefill(script, prefill=[busy.address], allow_aggregated_fallback=True)
        async with mortal as (cluster, server):
            flap(cluster)
            await leave(cluster, server)
            async with asyncio.timeout(10):
                canary = asyncio.ensure_future(cluster.canary())
                await busy.wait_until(lambda: bool(busy.prefill_requests))
                script.release.set()
                await canary
            assert (len(busy.prefill_requests), await fallbacks(cluster)) == (1, 0)
