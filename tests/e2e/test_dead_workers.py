"""Real workers that are killed under load: every request has its end, and who is left serves.

Two prefill and two decode workers, shared by the tests; each begins by starting what the one before has ended.
"""

import asyncio
import statistics
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass

import pytest

from common.handoff.zmq_socket import HEARTBEAT_TIMEOUT_MS
from tests.e2e.cluster import PATIENT_ROUTER, Answer, Client, request_body
from tests.e2e.fleet import Fleet, until_healthy, until_status
from tests.e2e.long_requests import LONG, assert_ended, generate, handed_over, until_decoding, until_handing_over
from tests.e2e.test_routing_rows import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dead_workers")]

#: Affected requests have failed by then, and refusals have come: it takes milliseconds, and seconds on a busy machine.
#: Who waits for one that is dead waits for a minute: the router (see `patient_router`) and handoffs.
AT_ONCE_S = 15.0
#: Most refusals come sooner, on a busy machine too.
REFUSED_S = 1.0
#: Streams of others stand still for less than it takes to find out by silence that a peer of the handoff is dead.
GAP_S = HEARTBEAT_TIMEOUT_MS / 1000


@pytest.fixture(scope="module", autouse=True)
def patient_router(fleet: Fleet) -> Iterator[None]:
    """The fleet's router gives no worker up for a silence while these tests run."""

    def restart(flags: tuple[str, ...]) -> None:
        fleet.router.kill()
        fleet.router_flags = flags
        fleet.restart_router()

    usual = fleet.router_flags
    restart((*usual, *PATIENT_ROUTER))
    yield
    restart(usual)


async def test_a_killed_decode_worker_ends_its_requests_in_errors_and_no_others(
    fleet: Fleet, fleet_client: Client
) -> None:
    """kill -9 in mid-stream never looks like an end; vllm#57089, Bamboo-agent#355. Then it comes back where it was."""
    is_stream = [index < 4 for index in range(8)]  # whichever worker an index goes to, it has some of both
    requests = [asyncio.create_task(generate(fleet_client, index, LONG, stream=is_stream[index])) for index in range(8)]
    await until_decoding(fleet_client, len(requests))
    [victim, survivor] = fleet.of("decode")
    victim.kill()
    async with asyncio.timeout(AT_ONCE_S):
        while sum(request.done() for request in requests) < 4:
            await asyncio.wait([request for request in requests if not request.done()], return_when="FIRST_COMPLETED")
    answers = await asyncio.gather(*requests)
    complete, failed = assert_ended(answers, LONG)
    assert (len(complete), len(failed)) == (4, 4)
    for answer, stream in zip(answers, is_stream, strict=True):
        assert answer.status == (502 if answer.error and not stream else 200), "a stream had begun"
    again = fleet.restart(victim)
    await until_healthy(fleet_client, survivor, again)
    assert not assert_ended([await generate(fleet_client, i, 4) for i in range(4)], 4)[1]


async def test_a_killed_prefill_worker_harms_neither_decode_nor_what_it_handed_over(
    fleet: Fleet, fleet_client: Client
) -> None:
    """sglang#31144, #31306, #29570, #28596; vllm#49238: nobody waits for a dead peer, which may come back.

    What it costs a decode worker when that happens often: `test_a_prefill_worker_starts_again_and_again`.
    """
    streams = [asyncio.create_task(generate(fleet_client, i, LONG)) for i in range(2)]
    await until_decoding(fleet_client, len(streams))
    [victim, _] = fleet.of("prefill")
    decode_pids = [worker.pid for worker in fleet.of("decode")]
    before = await handed_over(fleet_client)
    requests = [
        asyncio.create_task(timed(generate(fleet_client, i, 4, length=1800, stream=i % 2 == 0))) for i in range(10)
    ]
    await until_handing_over(fleet_client, before)
    victim.kill()
    killed_at = time.monotonic()
    assert not any(stream.done() for stream in streams)
    ends = await asyncio.gather(*requests)
    complete, failed = assert_ended([answer for answer, _ in ends], 4)
    assert complete
    assert failed
    assert max(ended_at for answer, ended_at in ends if answer.error) - killed_at < AT_ONCE_S
    for stream in await asyncio.gather(*streams):
        assert not assert_ended([stream], LONG)[1]
        assert stream.longest_gap_s(killed_at) < GAP_S
    again = fleet.restart(victim)
    await until_healthy(fleet_client, again)
    answers = await asyncio.gather(*(generate(fleet_client, i, 4) for i in range(20)))
    assert not assert_ended(answers, 4)[1]
    assert [worker.pid for worker in fleet.of("decode") if worker.popen.poll() is None] == decode_pids


async def timed(request: Coroutine[None, None, Answer]) -> tuple[Answer, float]:
    """The answer, and when it was complete."""
    return await request, time.monotonic()


async def test_without_decode_workers_requests_are_refused_fast_until_one_is_back(
    fleet: Fleet, fleet_client: Client
) -> None:
    """Infera#82, sglang#7028: at the same address or at another one, with the same router."""
    dead, router_pid = fleet.of("decode"), fleet.router.pid
    requests: list[asyncio.Task[Refusal]] = []
    for index in range(40):
        if index == 10:
            for worker in dead:
                worker.kill()
        requests.append(asyncio.create_task(refusal(fleet_client, index)))
        await asyncio.sleep(0.05)  # the load itself: 20 requests per second, whatever becomes of those before
    async with asyncio.timeout(AT_ONCE_S):
        refusals = await asyncio.gather(*requests)
    assert {each.status for each in refusals[:10]} <= {200, 502, 503}
    for each in refusals[10:]:
        assert each.status == 503, "nothing was sent to a dead worker, so that nothing was lost with it"
        assert each.retry_after == "1"
        assert each.took_s < AT_ONCE_S
    assert statistics.median(each.took_s for each in refusals[10:]) < REFUSED_S
    assert fleet.router.popen.poll() is None
    same = fleet.restart(dead[0])
    await until_status(fleet_client, "/ready", 200)
    assert not assert_ended([await generate(fleet_client, 1, 4)], 4)[1]
    same.kill()
    await until_status(fleet_client, "/ready", 503)
    fleet.drop(same, dead[1])
    elsewhere = fleet.launch("decode")
    fleet.admit(elsewhere)
    assert elsewhere.address not in (same.address, dead[1].address)
    await until_status(fleet_client, "/ready", 200)
    assert not assert_ended([await generate(fleet_client, 1, 4)], 4)[1]
    assert (fleet.router.pid, fleet.router.popen.poll()) == (router_pid, None)


@dataclass(frozen=True)
class Refusal:
    """What became of a request, with luck."""

    status: int
    retry_after: str | None
    took_s: float


async def refusal(client: Client, index: int) -> Refusal:
    body = request_body(prompt_of(40, index), max_tokens=4, ignore_eos=True)
    began = time.monotonic()
    async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
        await response.read()
    return Refusal(response.status, response.headers.get("Retry-After"), time.monotonic() - began)
