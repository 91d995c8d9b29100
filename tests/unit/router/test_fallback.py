"""Prompts without a handoff: those that decode keeps for itself, and all of them where no prefill worker is healthy."""

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.config import RouterSettings
from common.pb import decode_pb2, prefill_pb2, types_pb2, worker_pb2
from router.fleet import Fleet
from router.keys import FLEET, METRICS
from router.pairing import Member, leader
from tests.fakes.fake_workers import FakeWorker, Script, description, expected_tokens, serving
from tests.unit.router.cluster import Cluster, over, running
from tests.unit.router.test_failures import assert_nothing_left

PREFILL, DECODE, BOTH = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_BOTH
REMOTE, LOCAL = decode_pb2.PREFILL_SITE_REMOTE, decode_pb2.PREFILL_SITE_LOCAL

PROMPT = [5, 6, 7]
BODY: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}, "request_id": "mine"}

#: The fakes do not look at it.
NO_CONTEXT: Any = None


async def fallbacks(cluster: Cluster) -> float:
    """How often the router says that it fell back."""
    async with cluster.http.get("/metrics") as response:
        found = re.search(r"^moerelay_aggregated_fallbacks_total (\S+)$", await response.text(), re.M)
    assert found
    return float(found[1])


async def says(cluster: Cluster) -> tuple[bool, bool, bool]:
    """What /ready, /health and /cluster say about falling back, in a cluster that serves."""
    answers = [await cluster.get(path) for path in ("/ready", "/health")]
    assert [status for status, _ in answers] == [200, 200]
    _, view = await cluster.get("/cluster")
    assert view["router"]["ready"] is True
    return answers[0][1]["fallback"], answers[1][1]["fallback"], view["router"]["fallback"]


def sites(worker: FakeWorker) -> list[int]:
    return [request.prefill_site for request in worker.decode_requests]


# --- prompts that decode keeps for itself


async def test_prefill_never_hears_of_a_prompt_that_decode_computes_itself() -> None:
    """The fakes know full blocks of 16: of 18 tokens two are missing, of three all."""
    short, long = list(range(5, 23)), PROMPT
    async with running(Script(local_prefill_max_tokens=2)) as cluster:
        for stream in (False, True):
            for prompt in (short, long):
                body = BODY | {"token_ids": prompt}
                if stream:
                    assert (await cluster.stream(body))[-1] == b"[DONE]"
                else:
                    _, answer = await cluster.post(body)
                    assert answer["choices"][0]["token_ids"] == expected_tokens(prompt, 4)
        assert [list(request.token_ids) for request in cluster.prefill[0].prefill_requests] == [long, long]
        assert sites(cluster.decode[0]) == [REMOTE] * 4
        assert await fallbacks(cluster) == 0
        assert await says(cluster) == (False, False, False)
        await assert_nothing_left(cluster)


async def test_prefill_does_not_hear_of_its_abort_either() -> None:
    async with running(Script(local_prefill_max_tokens=3, hold_after=1)) as cluster:
        decode = cluster.decode[0]
        request = asyncio.ensure_future(cluster.post(BODY))
        await decode.wait_until(lambda: decode.num_chunks == 1)
        while cluster.app[METRICS].registry.get_sample_value("moerelay_time_to_first_token_seconds_count") != 1:
            await cluster.get("/live")  # the token is on its way to the router
        await cluster.post({"request_ids": ["mine"]}, "/inference/v1/abort_requests")
        _, answer = await request
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert len(decode.abort_requests) == 1
        assert cluster.prefill[0].abort_requests == []
        await assert_nothing_left(cluster)


async def test_it_needs_no_prefill_worker_any_more() -> None:
    script = Script(local_prefill_max_tokens=3, hold_after=1)
    async with MortalPrefill(script) as (cluster, server):
        decode = cluster.decode[0]
        request = asyncio.ensure_future(cluster.post(BODY))
        await decode.wait_until(lambda: decode.num_chunks == 1)
        await server.aclose()
        for _ in range(2):
            await cluster.until_settled()
        script.release.set()
        assert (await request)[1]["choices"][0]["token_ids"] == expected_tokens(PROMPT, 4)


class ConfusedWorker(FakeWorker):
    """Says two things of which only one can be."""

    def __init__(self, *events: decode_pb2.GenerateEvent) -> None:
        super().__init__("decode-0", DECODE, Script())
        self._events = events

    async def Generate(self, request: decode_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        async with self._serving(request.request_id):
            for event in self._events:
                await context.write(event)
            await asyncio.Event().wait()


LEASE = decode_pb2.GenerateEvent(lease=prefill_pb2.Lease(transfer_id=1))
NO_LEASE = decode_pb2.GenerateEvent(local_prefill=decode_pb2.LocalPrefill())


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((NO_LEASE, LEASE), "sent a lease that nobody asked for"),
        ((LEASE, NO_LEASE), "did without a handoff that nobody offered"),
        ((NO_LEASE, NO_LEASE), "did without a handoff that nobody offered"),
    ],
)
async def test_a_decode_worker_that_contradicts_itself(
    events: tuple[decode_pb2.GenerateEvent, ...], message: str
) -> None:
    prefill = FakeWorker("prefill-0", PREFILL, Script())
    prefill.script.prefill_go.clear()
    async with over([prefill], [ConfusedWorker(*events)]) as cluster:
        status, answer = await cluster.post(BODY)
        assert status == 500
        assert message in answer["error"]["message"]
        await assert_nothing_left(cluster)


# --- whole requests, where no prefill worker is healthy


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
    async with running(prefill=0, decode=2, allow_aggregated_fallback=True) as cluster:
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
    async with serving(prefill):
        address = prefill.address
    with capture_logs() as logs:
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
        await second.heartbeat(3)
        fleet.review()
        assert (second.usable, fleet.falls_back(), fleet.can_serve()) == (True, False, False)
        await first.heartbeat(3)
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
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
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
    async with over([], decodes, allow_aggregated_fallback=True) as cluster:
        assert await says(cluster) == (True, True, True)
        for _ in range(4):  # they take turns
            await cluster.canary()
        assert await fallbacks(cluster) == 2


class MortalPrefill(AsyncExitStack):
    """A pair whose prefill worker stops when the inner stack is closed. Heartbeats are the test's."""

    def __init__(self, script: Script, **settings: Any) -> None:
        super().__init__()
        self._script, self._settings = script, {"heartbeat_interval_s": 60, "connect_timeout_s": 0.3} | settings

    async def __aenter__(self) -> tuple[Cluster, AsyncExitStack]:  # type: ignore[override]
        server = await self.enter_async_context(AsyncExitStack())
        mortal = await server.enter_async_context(serving(FakeWorker("prefill-0", PREFILL, self._script)))
        decode = FakeWorker("decode-0", DECODE, self._script)
        prefill = [mortal.address, *self._settings.pop("prefill", [])]
        cluster = await self.enter_async_context(over([], [decode], prefill=prefill, **self._settings))
        return cluster, server


async def test_a_prefill_worker_that_just_left_is_done_without() -> None:
    """No heartbeat has missed it yet; the request finds out before it was sent anywhere."""
    async with MortalPrefill(Script(), allow_aggregated_fallback=True) as (cluster, server):
        await server.aclose()
        assert await says(cluster) == (False, False, False)
        await cluster.canary()
        assert (await says(cluster), await fallbacks(cluster)) == ((True, True, True), 1)
    async with MortalPrefill(Script()) as (cluster, server):
        await server.aclose()
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["message"]) == (503, "worker prefill-0 accepts no connection")


async def test_another_prefill_worker_goes_before_the_fallback() -> None:
    script = Script()
    async with serving(FakeWorker("prefill-1", PREFILL, script)) as other:
        mortal = MortalPrefill(script, prefill=[other.address], allow_aggregated_fallback=True)
        async with mortal as (cluster, server):
            await server.aclose()
            for _ in range(3):
                await cluster.canary()
            assert (len(other.prefill_requests), await fallbacks(cluster)) == (3, 0)


# --- who leads


def member(name: str, role: types_pb2.Role.ValueType, *, healthy: bool = True) -> Member:
    """The first letter of a worker's name is its weights."""
    status = worker_pb2.WorkerStatus(worker_id=name, role=role, model=description(fingerprint=name[0]))
    return Member(status, healthy=healthy, draining=False)


LEADERS: list[tuple[str, list[Member]]] = [
    ("a decode worker before prefill workers", [*(member(f"b{i}", PREFILL) for i in range(3)), member("a1", DECODE)]),
    ("a pair before many that fall back", [member("b1", DECODE), member("b2", DECODE), member("a1", BOTH)]),
    (
        "a pair before a decode worker whose prefill worker is suspect",
        [member("b1", DECODE), member("b2", PREFILL, healthy=False), member("a1", DECODE), member("a2", PREFILL)],
    ),
    ("the larger of two that fall back", [member("b1", DECODE), member("a1", DECODE), member("a2", DECODE)]),
    (
        "of two that fall back the one that may soon do without",
        [member("b1", DECODE), member("b2", DECODE), member("a1", DECODE), member("a2", PREFILL, healthy=False)],
    ),
    (
        "one that falls back now before a pair that is suspect",
        [member("b1", DECODE, healthy=False), member("b2", PREFILL, healthy=False), member("a1", DECODE)],
    ),
]


@pytest.mark.parametrize(("_", "members"), LEADERS, ids=[name for name, _ in LEADERS])
def test_who_serves_together(_: str, members: list[Member]) -> None:
    status = leader(members, fallback=True)
    assert status is not None
    assert status.worker_id == "a1"


def test_a_group_that_may_not_fall_back_is_no_better_than_one_that_cannot_serve() -> None:
    status = leader([member("b1", PREFILL), member("b2", PREFILL), member("a1", DECODE)])
    assert status is not None
    assert status.worker_id == "b1"
