"""A prefill worker that dies and comes back at its address, again and again, while clients send requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from tests.e2e.cluster import Answer, Client, until
from tests.e2e.fleet import Fleet, Process, until_healthy
from tests.e2e.long_requests import assert_ended, generate

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dead_workers"), pytest.mark.timeout(600)]

NUM_CLIENTS = 4
NUM_TOKENS = 8
#: A client that was refused comes back so soon, which is sooner than Retry-After asks for.
PAUSE_S = 0.05


@asynccontextmanager
async def only_prefill_worker(fleet: Fleet, client: Client) -> AsyncIterator[Process]:
    """One of the two; the other one is not listed meanwhile."""
    alone, other = fleet.of("prefill")
    fleet.drop(other)

    async def dropped() -> bool:
        return other.name not in await instances(client)

    try:
        await until(dropped)
        yield alone
    finally:
        fleet.admit(other)


async def instances(client: Client) -> dict[str, str]:
    """By worker: what names its start."""
    return {worker["id"]: worker["instance_id"] for worker in (await client.json("/cluster"))["workers"]}


@asynccontextmanager
async def load(client: Client) -> AsyncIterator[list[Answer]]:
    """Clients that send one request after the other; what they got so far."""
    answers: list[Answer] = []

    async def send(number: int) -> None:
        while True:
            answer = await generate(client, number, NUM_TOKENS, length=200)
            answers.append(answer)
            if answer.error:
                await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(send(number)) for number in range(NUM_CLIENTS)]
        yield answers
        for each in clients:
            each.cancel()


@pytest.mark.parametrize("num_restarts", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_a_prefill_worker_starts_again_and_again(fleet: Fleet, fleet_client: Client, num_restarts: int) -> None:
    """vllm#49238, sglang#31144, #31306, #29570: decode forgets the dead one, its sockets included, and serves.

    Requests fail as long as there is no prefill worker, in an error that says so; the first to one that has just come
    back may be too early, no later one is.
    """
    decode = fleet.of("decode")
    pids, starts = [worker.pid for worker in decode], set[str]()
    num_files = [0 for _ in decode]
    async with only_prefill_worker(fleet, fleet_client) as prefill:
        for number in range(num_restarts):
            async with load(fleet_client) as answers:
                await served(answers)
                prefill.kill()
                prefill = await asyncio.to_thread(fleet.restart, prefill)
                first = await generate(fleet_client, 1000 + number, NUM_TOKENS)
                assert (first.status, first.error is None) in ((200, True), (503, False))
                await until_healthy(fleet_client, prefill)
                num_before = len(answers)
                later = [await generate(fleet_client, 2000 + i, NUM_TOKENS) for i in range(5)]
                assert not assert_ended(later, NUM_TOKENS)[1]
            assert_ended(answers, NUM_TOKENS)
            assert not assert_ended(answers[num_before + NUM_CLIENTS :], NUM_TOKENS)[1]
            starts.add((await instances(fleet_client))[prefill.name])
            if number == 0:
                num_files = [open_files(worker) for worker in decode]
        assert len(starts) == num_restarts
        assert [worker.pid for worker in decode if worker.popen.poll() is None] == pids

        async def none_left() -> bool:
            return all(open_files(worker) <= num for worker, num in zip(decode, num_files, strict=True))

        await until(none_left)


async def served(answers: list[Answer]) -> None:
    """Some requests have been."""

    async def reached() -> bool:
        return any(answer.error is None for answer in answers)

    await until(reached)


def open_files(worker: Process) -> int:
    """Sockets above all, of every kind, and what libraries keep for each."""
    return psutil.Process(worker.pid).num_fds()
