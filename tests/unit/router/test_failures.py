"""Whatever breaks behind the router: the client is told once, in a typed error, and both workers are let go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from common.errors import (
    HTTP_TABLE,
    HandoffCorruptError,
    HandoffError,
    HandoffRefusedError,
    HandoffTimeoutError,
    InternalError,
    InvalidRequestError,
    MoerelayError,
    OverloadedError,
    RoutingMissingError,
    UnavailableError,
    WorkerLostError,
)
from common.pb import types_pb2
from router import prompt_run
from router.keys import FLEET, LIVE
from router.worker_state import State
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens, serving
from tests.ports import reserved_address
from tests.unit.router.cluster import GENERATE, Cluster, over, running, split_events, strict_json

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 10}}
STREAM = BODY | {"stream": True}
#: For the second report of a broken handoff, which a test makes come.
PATIENT_S = 60.0

ERRORS: list[tuple[MoerelayError, int, str]] = [
    (OverloadedError("the queue is full"), 429, "RateLimitError"),
    (UnavailableError("draining"), 503, "ServiceUnavailableError"),
    (WorkerLostError("gone"), 502, "WorkerLostError"),
    (HandoffError("broken"), 502, "HandoffError"),
    (HandoffRefusedError("block sizes differ"), 502, "HandoffRefusedError"),
    (HandoffCorruptError("checksum"), 502, "HandoffCorruptError"),
    (HandoffTimeoutError("no progress"), 504, "HandoffTimeoutError"),
    (InternalError("bug"), 500, "InternalServerError"),
    (RoutingMissingError("row 3"), 500, "InternalServerError"),
]


async def assert_nothing_left(cluster: Cluster) -> None:
    """Neither worker holds a call, and the router holds no request."""
    for worker in cluster.prefill + cluster.decode:
        await worker.wait_until(lambda worker=worker: not worker.live)  # type: ignore[misc]
    await asyncio.wait_for(cluster.app[LIVE].wait_empty(), 30)


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_errors_of_workers_keep_their_type(error: MoerelayError, status: int, kind: str, side: str) -> None:
    script = Script(hold_after=0)
    if side == "prefill":
        script.prefill_error = error
    else:
        script.decode_error, script.break_after, script.hold_after = error, 0, None
    for body in (BODY, STREAM):
        async with running(script) as cluster, cluster.http.post(GENERATE, json=body) as response:
            assert (response.status, response.content_type) == (status, "application/json")
            answer = (await response.json())["error"]
            assert (answer["type"], answer["code"]) == (kind, status)
            assert error.message in answer["message"]
            assert ("Retry-After" in response.headers) == (status in (429, 503))
            await assert_nothing_left(cluster)


async def test_errors_after_the_first_byte_are_the_last_event() -> None:
    script = Script(break_after=5, decode_error=HandoffCorruptError("checksum of frame 3"))
    async with running(script) as cluster:
        async with cluster.http.post(GENERATE, json=STREAM) as response:
            assert response.status == 200
            events = split_events(await response.read())
            assert response.connection is None
        *tokens, last = [strict_json(event.decode()) for event in events]
        told = [choice["token_ids"] for event in tokens for choice in event["choices"]]
        # The error may overtake the last tokens: it comes in the request's own call, they in the worker's feed.
        assert told == [[18], [25], [32], [39], [46]][: len(told)]
        assert told
        assert all(choice["finish_reason"] is None for event in tokens for choice in event["choices"])
        assert last["error"] == {
            "message": "checksum of frame 3",
            "type": "HandoffCorruptError",
            "param": None,
            "code": 502,
        }
        await assert_nothing_left(cluster)


async def test_a_stream_that_ends_without_finish_reason_is_an_error() -> None:
    async with running(Script(break_after=5)) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["type"]) == (502, "WorkerLostError")
        last = strict_json((await cluster.stream(BODY))[-1].decode())
        assert last["error"]["type"] == "WorkerLostError"
        await assert_nothing_left(cluster)


@pytest.mark.parametrize("missing", [1, -1])
async def test_row_counts_are_checked(missing: int) -> None:
    """One row too few or too many: never an answer with rows that do not fit its tokens."""
    async with running(Script(missing_rows=missing)) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert "routing rows" in answer["error"]["message"]
        events = await cluster.stream(BODY)
        assert "routing rows" in strict_json(events[-1].decode())["error"]["message"]
        await assert_nothing_left(cluster)


async def test_prefill_that_fails_half_way_ends_the_stream_at_once() -> None:
    script = Script(prompt_chunk=1, hold_after=1, prefill_error=HandoffError("send failed"))
    script.prefill_go.clear()
    async with running(script) as cluster:
        async with cluster.http.post(GENERATE, json=STREAM) as response:
            first = await response.content.readuntil(b"\n\n")
            script.prefill_go.set()
            events = split_events(first + await response.read())
        assert strict_json(events[-1].decode())["error"]["type"] == "HandoffError"
        await assert_nothing_left(cluster)
        assert len(cluster.decode[0].cancelled) == 1


async def test_decode_that_fails_cancels_prefill() -> None:
    script = Script(break_after=0, decode_error=OverloadedError("full"))
    script.prefill_go.clear()
    async with running(script) as cluster:
        assert (await cluster.post(BODY))[0] == 429
        await assert_nothing_left(cluster)
        script.prefill_go.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_cancels_both_calls(stream: bool) -> None:
    script = Script(hold_after=3)
    script.prefill_go.clear()
    async with running(script) as cluster:
        request = asyncio.ensure_future(cluster.http.post(GENERATE, json=BODY | {"stream": stream}))
        prefill, decode = cluster.prefill[0], cluster.decode[0]
        await decode.wait_until(lambda: decode.num_chunks == 3)
        await prefill.wait_until(lambda: len(prefill.prefill_requests) == 1)
        if stream:
            (await request).close()
        else:
            request.cancel()
        await assert_nothing_left(cluster)
        assert decode.cancelled == prefill.cancelled == [decode.decode_requests[0].request_id]
        script.release.set()
        script.prefill_go.set()
        await cluster.canary()


async def test_many_clients_that_leave() -> None:
    script = Script(hold_after=1, chunk_tokens=2)
    async with running(script) as cluster:
        decode = cluster.decode[0]
        for round_ in range(1, 51):
            response = await cluster.http.post(GENERATE, json=STREAM)
            response.close()
            await decode.wait_until(lambda expected=round_: len(decode.cancelled) == expected)  # type: ignore[misc]
        await assert_nothing_left(cluster)
        script.release.set()
        await cluster.canary()


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_worker_that_stops_breaks_its_streams(stream: bool) -> None:
    """A server that stops cancels its calls; that must not look like a client that left, nor like an end."""
    script = Script(hold_after=5)
    decode = FakeWorker("decode-0", types_pb2.ROLE_BOTH, script)
    async with AsyncExitStack() as server:
        await server.enter_async_context(serving(decode))
        async with over([], [], decode=[decode.address]) as cluster:
            request = asyncio.ensure_future(cluster.http.post(GENERATE, json=BODY | {"stream": stream}))
            await decode.wait_until(lambda: decode.num_chunks == 5)
            await server.aclose()
            async with await request as response:
                text = await response.text()
            last = strict_json(text.strip().rpartition("data: ")[2])
            assert last["error"]["type"] == "WorkerLostError"
            assert response.status == (200 if stream else 502)
            assert "[DONE]" not in text


async def test_no_workers() -> None:
    async with running(prefill=0, decode=0) as cluster, cluster.http.post(GENERATE, json=BODY) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert "none is configured" in (await response.json())["error"]["message"]
        assert (await cluster.get("/live"))[0] == 200
        assert (await cluster.get("/ready"))[0] == 503
        assert (await cluster.get("/health"))[0] == 503


async def test_dead_worker_gives_fast_503_and_comes_back_at_its_address() -> None:
    script = Script()
    prefill = FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, script)
    decode = FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)
    with reserved_address() as address:
        async with serving(prefill), over([], [], prefill=[prefill.address], decode=[address]) as cluster:
            status, answer = await cluster.post(BODY)
            assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
            assert f"decode worker {address} is dead" in answer["error"]["message"]
            async with serving(decode, address):
                while (await cluster.get("/ready"))[0] != 200:
                    await cluster.until_settled()
                await cluster.canary()


async def test_prefill_that_fails_after_the_finish_changes_nothing() -> None:
    """Its acknowledgement may be lost while decode has long finished."""
    script = Script(prefill_error=HandoffError("no acknowledgement"))
    script.prefill_go.clear()
    async with running(script) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        await assert_nothing_left(cluster)


@asynccontextmanager
async def cluster_with_mortal_prefill(script: Script) -> AsyncIterator[tuple[Cluster, FakeWorker, AsyncExitStack]]:
    """One pair; closing the stack stops the prefill worker's server. Heartbeats are the test's."""
    prefill = FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, script)
    async with AsyncExitStack() as server:
        await server.enter_async_context(serving(prefill))
        decodes = [FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)]
        async with over([], decodes, prefill=[prefill.address], heartbeat_interval_s=60) as cluster:
            yield cluster, prefill, server


async def test_prefill_worker_that_leaves_after_its_handoff_harms_no_stream() -> None:
    script = Script(hold_after=2)
    async with cluster_with_mortal_prefill(script) as (cluster, prefill, server):
        request = asyncio.ensure_future(cluster.post(BODY))
        decode, fleet = cluster.decode[0], cluster.app[FLEET]
        await decode.wait_until(lambda: decode.num_chunks == 2)
        await prefill.wait_until(lambda: bool(prefill.prefill_requests) and not prefill.live)
        while [worker.load for worker in fleet.workers] != [0, 1]:  # its reply is on its way
            await cluster.get("/live")
        await server.aclose()
        while fleet.workers[0].state is not State.DEAD:
            await cluster.until_settled()
        script.release.set()
        status, answer = await request
    assert (status, answer["choices"][0]["token_ids"]) == (200, expected_tokens([5, 6, 7], 10))


async def test_abort_needs_no_prefill_worker_that_has_left() -> None:
    script = Script(hold_after=2)
    async with cluster_with_mortal_prefill(script) as (cluster, _, server):
        request = asyncio.ensure_future(cluster.post(BODY | {"request_id": "mine"}))
        decode = cluster.decode[0]
        await decode.wait_until(lambda: decode.num_chunks == 2)
        await server.aclose()
        status, answer = await cluster.post({"request_ids": ["mine"]}, "/inference/v1/abort_requests")
        assert (status, answer["aborted"]) == (200, ["mine"])
        status, answer = await request
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")


async def test_prefill_call_that_is_lost_after_the_first_token_harms_no_stream() -> None:
    """Decode has the whole prompt; only the acknowledgement did not reach the router."""
    script = Script(hold_after=2)
    script.prefill_go.clear()
    async with (
        cluster_with_mortal_prefill(script) as (cluster, prefill, server),
        cluster.http.post(GENERATE, json=STREAM) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        await prefill.wait_until(lambda: len(prefill.live) == 1)
        await server.aclose()
        while cluster.app[FLEET].workers[0].state is not State.DEAD:
            await cluster.until_settled()
        script.release.set()
        events = split_events(first + await response.read())
    assert events[-1] == b"[DONE]"
    assert len(events) == 11


async def test_a_loss_that_a_worker_reports_is_not_its_own() -> None:
    """Prefill lost its connection to decode: it goes on serving, and the message is passed on as it is."""
    script = Script(hold_after=0, prefill_error=WorkerLostError("the connection to decode-7 is lost"))
    async with running(script, heartbeat_interval_s=60) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["message"]) == (502, "the connection to decode-7 is lost")
        assert [worker.state for worker in cluster.app[FLEET].workers] == [State.HEALTHY, State.HEALTHY]
        script.prefill_error, script.hold_after = None, None
        await cluster.canary()


async def test_a_worker_that_cannot_be_reached_is_suspect() -> None:
    script = Script(hold_after=0)
    script.prefill_go.clear()
    async with cluster_with_mortal_prefill(script) as (cluster, prefill, server):
        request = asyncio.ensure_future(cluster.post(BODY))
        await prefill.wait_until(lambda: len(prefill.live) == 1)
        await server.aclose()
        status, answer = await request
        assert (status, answer["error"]["type"]) == (502, "WorkerLostError")
        assert "prefill-0" in answer["error"]["message"]
        assert [worker.state for worker in cluster.app[FLEET].workers] == [State.SUSPECT, State.HEALTHY]


@pytest.mark.parametrize("error", [InvalidRequestError("too long"), OverloadedError("full"), InternalError("NaN")])
async def test_prefills_own_error_is_the_cause_of_a_broken_handoff(
    error: MoerelayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when decode, which only saw the transfer end, reports first."""
    monkeypatch.setattr(prompt_run, "CAUSE_WAIT_S", PATIENT_S)
    script = Script(break_after=0, decode_error=HandoffError("the sender gave up"), prefill_error=error)
    script.prefill_go.clear()
    async with running(script) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        decode = cluster.decode[0]
        await decode.wait_until(lambda: bool(decode.decode_requests) and not decode.live)
        script.prefill_go.set()
        _, answer = await request
        assert (answer["error"]["message"], answer["error"]["code"]) == (error.message, HTTP_TABLE[type(error)][0])
        await assert_nothing_left(cluster)


@pytest.mark.parametrize("decode_first", [True, False])
async def test_of_two_broken_handoffs_decodes_report_counts(
    decode_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_run, "CAUSE_WAIT_S", PATIENT_S)
    script = Script(
        hold_after=0,
        break_after=0,
        decode_error=HandoffCorruptError("checksum"),
        prefill_error=HandoffTimeoutError("no acknowledgement"),
    )
    script.prefill_go.clear()
    async with running(script) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        decode, prefill = cluster.decode[0], cluster.prefill[0]
        await prefill.wait_until(lambda: len(prefill.live) == 1)
        steps = [(decode, script.release), (prefill, script.prefill_go)]
        for worker, go in steps if decode_first else reversed(steps):
            go.set()
            await worker.wait_until(lambda worker=worker: not worker.live)  # type: ignore[misc]
        status, answer = await request
        assert (status, answer["error"]["type"]) == (502, "HandoffCorruptError")


async def test_a_broken_handoff_whose_cause_stays_unknown_is_reported_all_the_same() -> None:
    script = Script(break_after=0, decode_error=HandoffTimeoutError("no progress"))
    script.prefill_go.clear()
    async with running(script) as cluster:
        assert (await asyncio.wait_for(cluster.post(BODY), 30))[0] == 504
        await assert_nothing_left(cluster)


async def test_the_end_of_the_drain_reaches_requests_that_still_connect() -> None:
    decode = FakeWorker("decode-0", types_pb2.ROLE_BOTH, Script())
    async with AsyncExitStack() as server:
        await server.enter_async_context(serving(decode))
        settings = {"decode": [decode.address], "heartbeat_interval_s": 60, "connect_timeout_s": 60}
        async with over([], [], **settings) as cluster:
            await server.aclose()
            request = asyncio.ensure_future(cluster.post(BODY))
            while (await cluster.get("/cluster"))[1]["router"]["in_flight"] == 0:
                pass
            cluster.app[LIVE].fail_all(UnavailableError("the router was stopped"))
            status, answer = await asyncio.wait_for(request, 30)
            assert (status, answer["error"]["message"]) == (503, "the router was stopped")
            await assert_nothing_left(cluster)


async def test_worker_that_falls_silent_fails_its_requests() -> None:
    """Two heartbeats without an answer: the request ends although its connection still stands."""
    script = Script(hold_after=1)
    async with running(script, heartbeat_interval_s=60) as cluster:
        decode = cluster.decode[0]
        request = asyncio.ensure_future(cluster.post(BODY))
        await decode.wait_until(lambda: decode.num_chunks == 1)
        decode.answers.clear()
        [silent] = [worker for worker in cluster.app[FLEET].workers if worker.side == "decode"]
        for state in (State.SUSPECT, State.DEAD):
            assert not request.done()
            await silent.heartbeat(0.2)
            assert silent.state is state
        status, answer = await asyncio.wait_for(request, 30)
        assert (status, answer["error"]["type"]) == (502, "WorkerLostError")
        assert "decode-0 is lost" in answer["error"]["message"]
        decode.answers.set()
        await assert_nothing_left(cluster)
