"""A prompt is offered to another pair only while no worker has done anything for it, and not without end."""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import pytest

from common.errors import InternalError, MoerelayError, NotTakenError, UnavailableError, WorkerLostError
from common.pb import types_pb2
from router.keys import FLEET
from router.worker_state import State
from tests.fakes.fake_workers import FakeWorker, Script, expected_tokens, serving
from tests.unit.router.cluster import Cluster, over

BODY = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
DRAINING = NotTakenError("the worker is draining and takes no new requests")


def decodes(*errors: MoerelayError | None) -> list[FakeWorker]:
    """Decode workers that end each request before its first token with an error, or serve it."""
    scripts = [Script(break_after=None if error is None else 0, decode_error=error) for error in errors]
    return [FakeWorker(f"decode-{i}", types_pb2.ROLE_BOTH, script) for i, script in enumerate(scripts)]


def num_requests(workers: Sequence[FakeWorker]) -> list[int]:
    return [len(worker.decode_requests) for worker in workers]


async def test_what_a_draining_worker_does_not_take_goes_to_another() -> None:
    async with over([], decodes(DRAINING, None), placement="round_robin", heartbeat_interval_s=60) as cluster:
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
    async with over([refusing, taking], [decode], placement="round_robin", heartbeat_interval_s=60) as cluster:
        request = asyncio.ensure_future(cluster.post(BODY))
        await taking.wait_until(lambda: bool(taking.prefill_requests))
        script.release.set()
        status, answer = await request
        assert (status, answer["choices"][0]["token_ids"]) == (200, expected_tokens([5, 6, 7], 4))
        assert len(refusing.prefill_requests) == 1
        first, second = (message.request_id for message in decode.decode_requests)
        assert first != second, "the decode worker may not have let go of the first one yet"


async def test_attempts_are_bounded() -> None:
    workers = decodes(DRAINING, DRAINING, DRAINING, None)
    async with over([], workers, placement="round_robin", heartbeat_interval_s=60, max_attempts=3) as cluster:
        status, answer = await cluster.post(BODY)
        assert (status, answer["error"]["message"]) == (503, DRAINING.message)
        assert num_requests(workers) == [1, 1, 1, 0]


async def test_one_attempt_is_no_second() -> None:
    workers = decodes(DRAINING, None)
    async with over([], workers, placement="round_robin", heartbeat_interval_s=60, max_attempts=1) as cluster:
        assert (await cluster.post(BODY))[0] == 503
        assert num_requests(workers) == [1, 0]


@pytest.mark.parametrize(
    ("error", "status"),
    [(WorkerLostError("gone"), 502), (InternalError("NaN"), 500), (UnavailableError("stopped in the middle"), 503)],
)
async def test_what_a_worker_has_taken_never_runs_a_second_time(error: MoerelayError, status: int) -> None:
    """Not even if the worker failed before the first token: nobody knows what it has done."""
    workers = decodes(error, error)
    async with over([], workers, heartbeat_interval_s=60) as cluster:
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
        async with over([], [], decode=addresses, placement="round_robin", heartbeat_interval_s=60) as cluster:
            request = asyncio.ensure_future(cluster.post(BODY))
            await broken.wait_until(lambda: bool(broken.live))
            await server.aclose()
            assert (await request)[0] == 502
            assert num_requests([broken, spare]) == [1, 0]


@contextmanager
def refusing_address() -> Iterator[str]:
    """Bound, so that nobody else gets the port, and not listening, so that connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


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
    with refusing_address() as address:
        async with serving(spare), over([], [], decode=[address, spare.address], connect_timeout_s=60) as cluster:
            await heard(cluster, address)
            for _ in range(3):
                assert (await cluster.post(BODY))[0] == 200
            assert len(spare.decode_requests) == 3
