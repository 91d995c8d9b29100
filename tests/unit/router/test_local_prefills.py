"""Prompts without a handoff that decode keeps for itself: prefill never hears of them."""

import asyncio
from typing import Any

import pytest

from common.pb import decode_pb2, prefill_pb2, types_pb2
from router.keys import METRICS
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens
from tests.unit.router.cluster import over, running
from tests.unit.router.fallbacks import MortalPrefill, fallbacks, leave, says
from tests.unit.router.test_failures import assert_nothing_left

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE
REMOTE = decode_pb2.PREFILL_SITE_REMOTE

PROMPT = [5, 6, 7]
BODY: dict[str, Any] = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}, "request_id": "mine"}


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
        assert [request.prefill_site for request in cluster.decode[0].decode_requests] == [REMOTE] * 4
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
        await leave(cluster, server)
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
