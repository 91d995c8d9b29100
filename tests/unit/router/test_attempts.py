"""A prompt is offered to another pair only while no worker has done anything for it, and not without end."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise

import pytest

from common.errors import InternalError, MoerelayError, NotTakenError, UnavailableError, WorkerLostError
from common.pb import decode_pb2, types_pb2
from router.keys import FLEET
from router.worker_state import State
from tests.fakes.fake_feed import FollowingContext
from tests.fakes.fake_workers import Context, FakeWorker, Script, expected_tokens, serving
from tests.ports import reserved_address
from tests.unit.router.cluster import Cluster, over

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
#: No heartbeat comes by itself, and no worker is taken for silent, however long the test takes.
SELDOM = {"heartbeat_interval_s": 60, "heartbeat_timeout_s": 60}
DRAINING = NotTakenError("the worker is draining and takes no new requests")


def decodes(*errors: MoerelayError | None) -> list[FakeWorker]:
    """Decode workers that end each request before its first token with an error, or serve it."""
    scripts = [Script(break_after=None if error is None else 0, decode_error=error) for error in errors]
    return [FakeWorker(f"decode-{i}", types_pb2.ROLE_BOTH, script) for i, script in enumerate(scripts)]


def num_requests(workers: Sequence[FakeWorker]) -> list[int]:
    return [len(worker.decode_requests) for worker in workers]


async def test_what_a_draining_worker_does_not_take_goes_to_another() -> None:
    async with over([], decodes(DRAINING, None), placement="round_robin", **SELDOM) as cluster:
        for _ in range(4):
            status, answer = await cluster.post(BODY)
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected_tokens([5, 6, 7], 4))
        # It was asked once, and is known to drain from then on.
        assert num_requests(cluster.decode) == [1, 4]
        assert cluster.app[FLEET].workers[0].state is State.DRAINING


async def test_a_draining_prefill_worker_is_replaced_and_decode_begins_anew() -> None:
    script = Script(hold_after=0)
    refusing = FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, Script(prefill_error=DRAINING))
    taking = FakeWorker("prefill-1", types_pb2.ROLE_PREFILL, script)
    decode = FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)
    async with over([refusing, taking], [decode], placement="round_robin", **SELDOM) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        await taking.wait_until(lambda: bool(taking.prefill_requests))
        script.release.set()
        status, answer = await request
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected_tokens([5, 6, 7], 4))
        assert len(refusing.prefill_requests) == 1
        first, second = (message.request_id for message in decode.decode_requests)
        assert first != second, "the decode worker may not have let go of the first one yet"


async def test_a_prefill_worker_that_is_lost_before_the_lease_is_replaced() -> None:
    script = Script()
    script.lease_go.clear()
    prefills = [FakeWorker(f"prefill-{i}", types_pb2.ROLE_PREFILL, script) for i in range(2)]
    decode = FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)
    async with over(prefills, [decode], placement="round_robin", heartbeat_interval_s=60) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        await decode.wait_until(lambda: len(decode.decode_requests) == 1)
        [lost] = [worker for worker in cluster.app[FLEET].workers if worker.side == "prefill" and worker.load]
        [spare] = [worker for worker in prefills if worker.address != lost.address]
        lost._fail_dependents("restarted")
        await decode.wait_until(lambda: len(decode.decode_requests) == 2)
        script.lease_go.set()
        status, answer = await request
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected_tokens([5, 6, 7], 4))
        assert [len(worker.prefill_requests) for worker in prefills] == [worker is spare for worker in prefills]
        assert [worker.load for worker in cluster.app[FLEET].workers] == [0, 0, 0]


async def test_a_prefill_worker_that_refuses_connections_after_the_lease_is_replaced() -> None:
    script = Script(hold_after=0)
    script.lease_go.clear()
    gone, spare = (FakeWorker(f"prefill-{i}", types_pb2.ROLE_PREFILL, script) for i in range(2))
    decode = FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)
    async with AsyncExitStack() as server, serving(spare), serving(decode):
        await server.enter_async_context(serving(gone))
        addresses = {"prefill": [gone.address, spare.address], "decode": [decode.address]}
        async with over([], [], **addresses, placement="round_robin", heartbeat_interval_s=60) as cluster:
            request = asyncio.ensure_future(cluster.post(BODY))
            await decode.wait_until(lambda: len(decode.decode_requests) == 1)
            await server.aclose()
            script.lease_go.set()
            await spare.wait_until(lambda: bool(spare.prefill_requests))
            script.release.set()
            status, answer = await request
            assert (status, answer["choices"][0]["token_ids"]) == (200, expected_tokens([5, 6, 7], 4))
            assert [len(worker.prefill_requests) for worker in (gone, spare)] == [0, 1]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_workers_are_needed_from_the_moment_that_they_are_chosen(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one of the two is connected to, discovery must not close the other as if nobody used it."""
    script = Script()
    async with over(
        [FakeWorker("prefill-0", types_pb2.ROLE_PREFILL, script)],
        [FakeWorker("decode-0", types_pb2.ROLE_DECODE, script)],
        heartbeat_interval_s=60,
    ) as cluster:
        [worker] = [worker for worker in cluster.app[FLEET].workers if worker.side == side]
        [other] = [worker for worker in cluster.app[FLEET].workers if worker.side != side]
        connecting, go = asyncio.Event(), asyncio.Event()

        async def connect(_timeout_s: float) -> None:
            connecting.set()
            await go.wait()

        monkeypatch.setattr(other, "connect", connect)
        request = asyncio.ensure_future(cluster.post(BODY))
        await connecting.wait()
        assert worker.is_needed
        go.set()
        assert (await request)[0] == 200
        assert not worker.is_needed


async def test_attempts_are_bounded() -> None:
    workers = decodes(DRAINING, DRAINING, DRAINING, None)
    async with over([], workers, placement="round_robin", **SELDOM, max_attempts=3) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["message"]) == (503, DRAINING.message)
        assert num_requests(workers) == [1, 1, 1, 0]


class Noting(FakeWorker):
    """Knows when its requests came, on the event loop's clock."""

    def __init__(self, worker_id: str, script: Script) -> None:
        super().__init__(worker_id, types_pb2.ROLE_BOTH, script)
        self.came_at: list[float] = []

    async def answer(self, request: decode_pb2.GenerateRequest, context: Context | FollowingContext) -> None:
        self.came_at.append(asyncio.get_running_loop().time())
        await super().answer(request, context)


async def test_between_attempts_there_are_pauses_that_double() -> None:
    """Drawn by chance, from half of 50 ms on for the first one."""
    script = Script(break_after=0, decode_error=DRAINING)
    workers = [Noting(f"decode-{i}", script) for i in range(5)]
    async with over([], [*workers], **SELDOM, max_attempts=5) as cluster:
        assert (await cluster.post(BODY))[0] == 503
    came_at = sorted(at for worker in workers for at in worker.came_at)
    pauses = [later - earlier for earlier, later in pairwise(came_at)]
    assert len(pauses) == 4
    assert all(pause >= least for pause, least in zip(pauses, (0.025, 0.05, 0.1, 0.2), strict=True)), pauses


NUM_CLIENTS, NUM_WAVES = 10, 10


async def test_an_outage_of_workers_that_answer_makes_no_storm() -> None:
    """sglang#34570: by their heartbeats they are fine, and they take nothing. At most two attempts for each request."""
    workers = decodes(DRAINING, DRAINING, DRAINING)
    async with over([], workers, heartbeat_interval_s=0.01) as cluster:
        for _ in range(NUM_WAVES):
            answers = await asyncio.gather(*(cluster.post(BODY) for _ in range(NUM_CLIENTS)))
            assert {status for status, _ in answers} == {503}
    ids = [request.request_id for worker in workers for request in worker.decode_requests]
    assert 0 < len(ids) <= 2 * NUM_CLIENTS * NUM_WAVES
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("hangs_up", [True, False], ids=["hang up", "say nothing"])
async def test_an_outage_of_addresses_that_only_connect_makes_no_storm(hangs_up: bool) -> None:
    """Whatever the router makes of them, each request costs at most two connections. miles#1334, sglang#34570."""
    async with AsyncExitStack() as kept, AsyncExitStack() as servers:
        dead = decodes(None, None)
        addresses = [kept.enter_context(reserved_address()) for _ in dead]
        for worker, address in zip(dead, addresses, strict=True):
            await servers.enter_async_context(serving(worker, address))
        async with over([], [], decode=addresses, connect_timeout_s=0.1, **SELDOM) as cluster:
            await servers.aclose()
            async with counting(addresses, hangs_up=hangs_up) as connections:
                for _ in range(NUM_WAVES):
                    for known in cluster.app[FLEET].workers:
                        known._state.heard(time.monotonic(), draining=False)
                    answers = await asyncio.gather(*(cluster.post(BODY) for _ in range(NUM_CLIENTS)))
                    assert {status for status, _ in answers} <= {502, 503}
            assert 0 < len(connections) <= 2 * NUM_CLIENTS * NUM_WAVES
    assert sum(num_requests(dead)) == 0


@asynccontextmanager
async def counting(addresses: Sequence[str], *, hangs_up: bool) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Accepts connections at these addresses, all that there were, and serves none."""
    connections: list[asyncio.StreamWriter] = []

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        if hangs_up:
            writer.close()

    async with AsyncExitStack() as stack:
        for address in addresses:
            host, _, port = address.rpartition(":")
            await stack.enter_async_context(await asyncio.start_server(accept, host, int(port)))
        try:
            yield connections
        finally:
            for writer in connections:
                writer.close()


async def test_one_attempt_is_no_second() -> None:
    workers = decodes(DRAINING, None)
    async with over([], workers, placement="round_robin", **SELDOM, max_attempts=1) as cluster:
        assert (await cluster.post(BODY))[0] == 503
        assert num_requests(workers) == [1, 0]


@pytest.mark.parametrize(
    ("error", "status"),
    [(WorkerLostError("gone"), 502), (InternalError("NaN"), 500), (UnavailableError("stopped in the middle"), 503)],
)
async def test_what_a_worker_has_taken_never_runs_a_second_time(error: MoerelayError, status: int) -> None:
    """Not even if the worker failed before the first token: nobody knows what it has done."""
    workers = decodes(error, error)
    async with over([], workers, **SELDOM) as cluster:
        for number in range(1, 4):
            assert (await cluster.post(BODY))[0] == status
            assert sum(num_requests(workers)) == number
    assert max(Counter(r.request_id for worker in workers for r in worker.decode_requests).values()) == 1


async def test_a_connection_that_breaks_after_the_request_was_taken() -> None:
    """miles#1334: one execution per request, although another worker could take it."""
    broken, spare = decodes(None, None)
    broken.script.hold_after = 0
    async with AsyncExitStack() as server, serving(spare):
        await server.enter_async_context(serving(broken))
        addresses = [broken.address, spare.address]
        async with over([], [], decode=addresses, placement="round_robin", **SELDOM) as cluster:
            request = asyncio.ensure_future(cluster.post(BODY))
            await broken.wait_until(lambda: bool(broken.live))
            await server.aclose()
            assert (await request)[0] == 502
            assert num_requests([broken, spare]) == [1, 0]


async def heard(cluster: Cluster, address: str) -> None:
    """Makes the router take the worker there for healthy, as it was a heartbeat ago."""
    fleet = cluster.app[FLEET]
    [worker] = [worker for worker in fleet.workers if worker.address == address]
    [other] = [worker for worker in fleet.workers if worker.state is State.HEALTHY]
    worker.status = other.described.__class__.FromString(other.described.SerializeToString())
    worker.status.instance_id = address
    worker._state.heard(time.monotonic(), draining=False)


async def test_a_worker_that_died_a_moment_ago_is_found_out_before_anything_is_sent() -> None:
    """Connections to it are refused at once: nobody waits for --connect-timeout-s, and the other one serves."""
    [spare] = decodes(None)
    with reserved_address() as address:
        async with serving(spare), over([], [], decode=[address, spare.address], connect_timeout_s=60) as cluster:
            await heard(cluster, address)
            for _ in range(3):
                assert (await cluster.post(BODY))[0] == 200
            assert len(spare.decode_requests) == 3
