"""Real workers that stand still: nobody waits for them, they say so where they can, and they serve again afterwards."""

import asyncio
import itertools
import time
from collections.abc import Sequence

import pytest

from tests.e2e.cluster import Answer, Client, until
from tests.e2e.fleet import (
    HEARTBEAT_TIMEOUT_S,
    Fleet,
    Process,
    Role,
    until_healthy,
    until_states,
    until_status,
    until_unwell,
)
from tests.e2e.frozen_thread import busiest_thread, cpu_times, frozen
from tests.e2e.long_requests import LONG, assert_ended, generate

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dead_workers")]

#: Of each of the requests that come at one time.
NUM_TOKENS = 40
#: Two heartbeats that are not answered, and what comes in between.
LIMIT_S = 2 * HEARTBEAT_TIMEOUT_S + 15


async def twenty(client: Client) -> list[tuple[Answer, float]]:
    """Answers at one time, and when each of them was complete."""

    async def one(index: int) -> tuple[Answer, float]:
        return await generate(client, index, NUM_TOKENS), time.monotonic()

    return await asyncio.gather(*(one(index) for index in range(20)))


async def test_one_frozen_decode_worker_stops_nobody_else(fleet: Fleet, fleet_client: Client) -> None:
    """production-stack#749: SIGSTOP leaves the connection open, and nothing comes. It is used again afterwards."""
    frozen, other = fleet.of("decode")
    usual = await twenty(fleet_client)
    frozen.freeze()
    try:
        frozen_out = await asyncio.wait_for(twenty(fleet_client), LIMIT_S)
        await until_states(fleet_client, **{frozen.name: "dead", other.name: "healthy"})
        assert not assert_ended([answer for answer, _ in await twenty(fleet_client)], NUM_TOKENS)[1]
        await until_status(fleet_client, "/ready", 200)
    finally:
        frozen.thaw()
    await until_healthy(fleet_client, frozen, other)
    usual += await twenty(fleet_client)
    assert not assert_ended([answer for answer, _ in usual], NUM_TOKENS)[1]
    complete, _ = assert_ended([answer for answer, _ in frozen_out], NUM_TOKENS)
    assert len(complete) >= 10, "every request that went to the other one"
    # None of them waited for the frozen one, as those do that have gone there.
    served_at = [ended_at for answer, ended_at in frozen_out if answer.error is None]
    assert max(served_at) < min(ended_at for answer, ended_at in frozen_out if answer.error)
    assert await both_are_used(fleet_client, [frozen, other])


async def both_are_used(client: Client, workers: Sequence[Process]) -> bool:
    """Requests are running on each of them at one time."""
    requests = [asyncio.create_task(generate(client, i, LONG)) for i in range(4)]

    async def reached() -> bool:
        view = (await client.json("/cluster"))["workers"]
        running = {worker["id"]: worker["running"] for worker in view}
        return all(running.get(worker.name) for worker in workers)

    await until(reached)
    return not assert_ended(await asyncio.gather(*requests), LONG)[1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_workers_of_a_role_nobody_is_ready(fleet: Fleet, fleet_client: Client, role: Role) -> None:
    """vllm#39863, #36451, Fastllm-proxy#19: one of the two is frozen, the other one killed."""
    frozen, killed = fleet.of(role)
    killed.kill()
    await until_status(fleet_client, "/ready", 200)
    frozen.freeze()
    try:
        await until_status(fleet_client, "/ready", 503)
        await until_status(fleet_client, "/health", 503)
        refused = await generate(fleet_client, 1, 4)
        assert (refused.status, refused.token_ids) == (503, [])
    finally:
        frozen.thaw()
    await until_status(fleet_client, "/ready", 200)
    await until_status(fleet_client, "/health", 200)
    assert not assert_ended([await generate(fleet_client, 2, 4)], 4)[1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_frozen_engine_makes_its_worker_unhealthy(fleet: Fleet, fleet_client: Client, role: Role) -> None:
    """vllm#39863, #36451: only the engine's thread stands still, in the middle of its work; the process answers."""
    worker, other = fleet.of(role)
    before = cpu_times(worker.pid)
    # Prompts for the one, tokens for the other: by the end of the first few the engine has worked the most by far,
    # and others come, so that it is at work whenever it is stopped.
    length, num_tokens = (1800, 4) if role == "prefill" else (40, LONG)
    stop, numbers, answers = asyncio.Event(), itertools.count(), list[Answer]()

    async def send() -> None:
        while not stop.is_set():
            answers.append(await generate(fleet_client, next(numbers), num_tokens, length=length))

    async with asyncio.TaskGroup() as requests:
        for _ in range(20):
            requests.create_task(send())
        await until(lambda: has_computed(worker, before))
        other.freeze()
        try:
            with frozen(busiest_thread(worker.pid, before)):
                stop.set()
                await until_unwell(worker)
                await until_status(fleet_client, "/ready", 503)
        finally:
            other.thaw()
        await until_healthy(fleet_client, worker, other)
        await until_status(fleet_client, "/ready", 200)
    assert_ended(answers, num_tokens)
    assert not assert_ended([await generate(fleet_client, i, 4) for i in range(4)], 4)[1]


async def has_computed(worker: Process, before: dict[int, float]) -> bool:
    """One of its threads, for a while."""
    now = cpu_times(worker.pid)
    return max(now[each] - before.get(each, 0.0) for each in now) > 0.2
