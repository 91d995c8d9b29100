"""Real workers that are killed, frozen and stopped under load: every request has its end, and who is left serves.

Two prefill and two decode workers, shared by the tests; each begins by starting what the one before has ended.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from common.model.synthesize import synthesize
from tests.e2e.cluster import Answer, Client, until
from tests.e2e.conftest import TINY
from tests.e2e.fleet import (
    HEARTBEAT_TIMEOUT_S,
    Fleet,
    Process,
    client_of,
    running_fleet,
    states,
    until_healthy,
    until_states,
    until_status,
)
from tests.e2e.test_routing_rows import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dead_workers")]

#: So many take seconds, in which a test can do something to a worker.
LONG = 800
#: Two heartbeats that are not answered, and what comes in between.
LIMIT_S = 2 * HEARTBEAT_TIMEOUT_S + 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("fleet")
    synthesize("qwen3_moe", "tiny", 7, TINY | {"max_position_embeddings": 2048}, model / "m")
    with running_fleet(model / "m", folder, "--placement", "round_robin") as running:
        yield running


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    fleet.complete()
    async with client_of(fleet) as client:
        await until_healthy(client, *fleet.workers)
        yield client


async def generate(client: Client, index: int, num_tokens: int, *, stream: bool = True) -> Answer:
    return await client.generate(prompt_of(40, index), stream=stream, max_tokens=num_tokens, ignore_eos=True)


async def until_decoding(client: Client, num_requests: int, num_tokens: int = 5) -> None:
    """All of them are past their prompts, on some worker each."""
    before = await client.metric("moerelay_generated_tokens_total", "decode")

    async def reached() -> bool:
        workers = (await client.json("/cluster"))["workers"]
        running = sum(worker["running"] or 0 for worker in workers if worker["role"] == "decode")
        generated = await client.metric("moerelay_generated_tokens_total", "decode")
        return bool(running >= num_requests and generated >= before + num_tokens * num_requests)

    await until(reached)


def assert_ended(answers: Sequence[Answer], num_tokens: int) -> tuple[list[Answer], list[Answer]]:
    """Those that are complete, and those that failed and say so; nothing else."""
    complete = [answer for answer in answers if answer.error is None]
    failed = [answer for answer in answers if answer.error is not None]
    for answer in complete:
        assert (len(answer.token_ids), answer.finish_reason) == (num_tokens, "length")
    for answer in failed:
        assert answer.finish_reason is None
        assert answer.error is not None
        assert answer.error["code"] in (502, 503)
    return complete, failed


async def test_a_killed_decode_worker_ends_its_requests_in_errors_and_no_others(fleet: Fleet, client: Client) -> None:
    """kill -9 in mid-stream never looks like an end; vllm#57089, Bamboo-agent#355. Then it comes back where it was."""
    requests = [asyncio.create_task(generate(client, i, LONG, stream=i % 4 != 0)) for i in range(8)]
    await until_decoding(client, len(requests))
    [victim, survivor] = fleet.of("decode")
    victim.kill()
    async with asyncio.timeout(LIMIT_S):
        while sum(request.done() for request in requests) < 4:
            await asyncio.wait([request for request in requests if not request.done()], return_when="FIRST_COMPLETED")
    answers = await asyncio.gather(*requests)
    complete, failed = assert_ended(answers, LONG)
    assert (len(complete), len(failed)) == (4, 4)
    assert {answer.status for answer in failed} == {200, 502}, "streams that began, and whole answers"
    again = fleet.restart(victim)
    await until_healthy(client, survivor, again)
    assert not assert_ended([await generate(client, i, 4) for i in range(4)], 4)[1]


async def test_a_killed_prefill_worker_harms_neither_decode_nor_what_it_handed_over(
    fleet: Fleet, client: Client
) -> None:
    """sglang#31144, #31306, #29570, #28596; vllm#49238: nobody waits for a dead peer, which may come back."""
    streams = [asyncio.create_task(generate(client, i, LONG)) for i in range(2)]
    await until_decoding(client, len(streams))
    [victim, _] = fleet.of("prefill")
    decode_pids = [worker.pid for worker in fleet.of("decode")]
    requests = [
        asyncio.create_task(client.generate(prompt_of(1800, i), stream=i % 2 == 0, max_tokens=4, ignore_eos=True))
        for i in range(10)
    ]
    before = await client.metric("moerelay_handoff_bytes_total", "decode")

    async def begun() -> bool:
        return await client.metric("moerelay_handoff_bytes_total", "decode") > before

    await until(begun)
    victim.kill()
    complete, failed = assert_ended(await asyncio.gather(*requests), 4)
    assert complete
    assert failed
    assert not assert_ended(await asyncio.gather(*streams), LONG)[1]
    for _ in range(2):
        victim = fleet.restart(victim)
        await until_healthy(client, victim)
        answers = await asyncio.gather(*(generate(client, i, 4) for i in range(20)))
        assert not assert_ended(answers, 4)[1]
        victim.kill()
    assert [worker.pid for worker in fleet.of("decode") if worker.popen.poll() is None] == decode_pids


async def test_one_frozen_decode_worker_stops_nobody_else(fleet: Fleet, client: Client) -> None:
    """production-stack#749, vllm#39863: SIGSTOP leaves the connection open, and nothing comes."""
    frozen, other = fleet.of("decode")
    frozen.freeze()
    try:
        answers = await asyncio.wait_for(asyncio.gather(*(generate(client, i, 8) for i in range(20))), LIMIT_S)
        complete, _ = assert_ended(answers, 8)
        assert len(complete) >= 10, "every request that went to the other one"
        await until_states(client, **{frozen.name: "dead", other.name: "healthy"})
        assert not assert_ended(await asyncio.gather(*(generate(client, i, 8) for i in range(20))), 8)[1]
        async with client.session.get(f"{client.url}/ready") as response:
            assert response.status == 200
        other.freeze()
        await until_status(client, "/ready", 503)
        await until_status(client, "/health", 503)
    finally:
        frozen.thaw()
        other.thaw()
    await until_healthy(client, frozen, other)
    await until_status(client, "/ready", 200)
    await asyncio.gather(*(generate(client, i, 8) for i in range(8)))
    assert await both_are_used(client, [frozen, other])


async def both_are_used(client: Client, workers: Sequence[Process]) -> bool:
    """Requests are running on each of them at one time."""
    requests = [asyncio.create_task(generate(client, i, LONG)) for i in range(4)]

    async def reached() -> bool:
        view = (await client.json("/cluster"))["workers"]
        running = {worker["id"]: worker["running"] for worker in view}
        return all(running.get(worker.name) for worker in workers)

    await until(reached)
    return not assert_ended(await asyncio.gather(*requests), LONG)[1]


async def test_without_decode_workers_requests_are_refused_fast_until_one_is_back(fleet: Fleet, client: Client) -> None:
    """Infera#82, sglang#7028: at the same address or at another one, with the same router."""
    dead = fleet.of("decode")
    for worker in dead:
        worker.kill()
    for index in range(20):
        began = time.monotonic()
        async with asyncio.timeout(LIMIT_S):
            answer = await generate(client, index, 4, stream=index % 2 == 0)
        assert answer.status in (502, 503)
        if index >= 10:  # by now heartbeats have told
            assert answer.status == 503
            assert time.monotonic() - began < 1
        await asyncio.sleep(0.05)  # the load itself: 20 requests per second
    body = {"token_ids": [5, 6, 7], "sampling_params": {}}
    async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert fleet.router.popen.poll() is None
    same = fleet.restart(dead[0])
    await until_status(client, "/ready", 200)
    assert not assert_ended([await generate(client, 1, 4)], 4)[1]
    same.kill()
    await until_status(client, "/ready", 503)
    fleet.drop(same, dead[1])
    elsewhere = fleet.launch("decode")
    fleet.admit(elsewhere)
    assert elsewhere.address not in (same.address, dead[1].address)
    await until_status(client, "/ready", 200)
    assert not assert_ended([await generate(client, 1, 4)], 4)[1]


async def test_workers_and_router_that_are_told_to_stop_finish_what_they_have(fleet: Fleet, client: Client) -> None:
    """llm-d#927, vllm#24885, #43208: SIGTERM cuts no stream; nothing new goes there; all exit with 0 in their time."""
    [decode, prefill] = [fleet.of("decode")[0], fleet.of("prefill")[0]]
    for leaving in (decode, prefill):
        streams = [asyncio.create_task(generate(client, i, LONG)) for i in range(6)]
        await until_decoding(client, len(streams))
        leaving.terminate()
        await until_states(client, **{leaving.name: "draining"})
        assert not assert_ended(await asyncio.gather(*(generate(client, 50 + i, 4) for i in range(10))), 4)[1]
        assert not assert_ended(await asyncio.gather(*streams), LONG)[1]
        assert await asyncio.to_thread(leaving.popen.wait, 10) == 0
        assert leaving.name not in {name for name, state in (await states(client)).items() if state == "healthy"}
