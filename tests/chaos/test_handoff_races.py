"""Clients that leave and networks that stall at every point of a handoff: nobody else sees it, nothing leaks.

The model is the fake one, whose tokens and rows depend on every byte of KV that a sequence reads back; the pools are so
small that a request gets the blocks that another one has just lost.
"""

import asyncio
import random

import pytest

from common.engine.solo import SoloRunner
from common.handoff.receiver import HandoffReceiver
from tests.e2e.cluster import Client, JsonObject, request_body, sse_events, until
from tests.e2e.oracle import assert_equals_solo
from tests.fakes.fake_runner import VOCAB_SIZE
from tests.integration.kit import fake_kit
from tests.integration.relay import PATIENCE_S, Relay, WorkerPlan, running_relay

KIT = fake_kit()
BLOCK_SIZE = 4
#: A prompt of 100 needs 25 blocks of 4; 40 hold one such prompt and a small one, never two.
SMALL_POOL = 40
#: 16 bytes of KV and 4 of routing per token: 100 tokens make 13 chunks of 8.
CREDIT_BYTES = 8 * 20
FIELDS: JsonObject = {"max_tokens": 5, "ignore_eos": True}


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def small(num_blocks: int = SMALL_POOL, timeout_s: float = PATIENCE_S) -> WorkerPlan:
    return WorkerPlan(KIT, num_blocks=num_blocks, chunk=8, credit_bytes=CREDIT_BYTES, timeout_s=timeout_s)


async def leave(request: "asyncio.Task[None]") -> None:
    """The client goes away: its socket is closed."""
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


def start(client: Client, prompt: list[int], *, stream: bool) -> "asyncio.Task[None]":
    """A client that reads its answer, in a task that can be cancelled."""

    async def read() -> None:
        body = request_body(prompt, stream=stream, **FIELDS)
        async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
            if stream:
                async for _ in sse_events(response):
                    pass
            else:
                await response.read()

    return asyncio.create_task(read())


async def answer_is_solo(relay: Relay, solo: SoloRunner, prompt: list[int]) -> None:
    answer = await relay.client.generate(prompt, **FIELDS)
    assert_equals_solo(answer, solo, prompt, **FIELDS)


async def leased_to_one(relay: Relay) -> bool:
    """D has let go of everything but the blocks of one request of 90 tokens."""
    assert isinstance(relay.decode.handoffs, HandoffReceiver)
    return relay.decode.blocks_used == -(-90 // BLOCK_SIZE) and relay.decode.handoffs.num_active == 1


@pytest.mark.parametrize("late", [False, True])
async def test_blocks_of_an_aborted_handoff_are_not_written_any_more(late: bool) -> None:
    """sgl-project/sglang#24527, #35049, vllm-project/vllm#45357.

    A is left at a random point of its throttled transfer, at once B needs the blocks that A had: 200 rounds. `late`: a
    chunk of A still lies in D's socket when B gets its lease.
    """
    rng, solo = random.Random(1), KIT.solo()
    async with running_relay(small(), WorkerPlan(KIT, chunk=8)) as relay:
        for round_ in range(100):
            if late and round_:  # in the first round the connection is still to be made
                relay.receiving.clear()
            relay.valve.allow(1 if late else rng.randrange(13))  # of the 13 chunks that 100 tokens make
            left = start(relay.client, prompt_of(100, round_), stream=rng.random() < 0.5)
            await relay.valve.wait_exhausted()
            await leave(left)
            follower = asyncio.create_task(answer_is_solo(relay, solo, prompt_of(90, round_)))
            await until(lambda: leased_to_one(relay))
            assert await relay.decode.violations() == []
            relay.receiving.set()
            relay.valve.open()
            await follower
        await relay.assert_baseline()


async def test_leaving_at_any_moment_leaks_nothing() -> None:
    """ai-dynamo/dynamo#7489: 300 clients leave after 0 to 100 % of their transfer, up to eight at once."""
    rng, solo = random.Random(2), KIT.solo()
    async with running_relay(small(160), WorkerPlan(KIT, chunk=8)) as relay:
        gate = asyncio.Semaphore(8)

        async def one(index: int) -> None:
            async with gate:
                prompt = prompt_of(rng.randrange(1, 100), index)
                request = start(relay.client, prompt, stream=rng.random() < 0.5)
                target = relay.valve.num_passed + rng.randrange(1, 2 + len(prompt) // 8)
                passed = asyncio.create_task(relay.valve.wait_passed(target))
                await asyncio.wait([request, passed], return_when=asyncio.FIRST_COMPLETED)
                passed.cancel()
                await leave(request)

        async with asyncio.TaskGroup() as group:
            for index in range(300):
                group.create_task(one(index))
        await relay.assert_baseline()
        await answer_is_solo(relay, solo, [5, 6, 7])


async def test_clients_that_leave_a_saturated_decode_worker() -> None:
    """vllm-project/vllm#50425: gone after routing, before decode has room. 200 clients; P holds nothing for them.

    Here P starts only once D has leased blocks, so the window in which P alone holds KV does not exist; what is tested
    is that those who wait for a lease, and the few who got one, leave nothing behind on either side.
    """
    rng, solo = random.Random(3), KIT.solo()
    async with running_relay(small(2 * SMALL_POOL), WorkerPlan(KIT, chunk=8)) as relay:
        for round_ in range(10):
            relay.valve.allow(rng.randrange(1, 20))  # then the network stalls: whoever has a lease keeps it
            leaving = [start(relay.client, prompt_of(100, 20 * round_ + i), stream=i % 2 == 0) for i in range(20)]
            await relay.valve.wait_exhausted()
            assert relay.decode.core.engine.load().waiting <= 18
            for client in leaving:
                await leave(client)
            await relay.assert_baseline()
            relay.valve.open()
            await answer_is_solo(relay, solo, prompt_of(100, round_))
        await relay.assert_baseline()


async def test_blocks_that_prefill_gave_up_do_not_reach_a_late_decode_worker() -> None:
    """vllm-project/vllm#21570, #25897: P gives up on a D that stands still, and fills its blocks with other prompts.

    Here P pushes and D never pulls, so D cannot read reused blocks: what D finds when it wakes are frames of leases
    that have ended. Requests of that time are typed errors, later ones are right.
    """
    solo = KIT.solo()
    # Time enough for the later ones on a busy machine.
    async with running_relay(small(timeout_s=2.0), small(timeout_s=2.0)) as relay:
        await answer_is_solo(relay, solo, prompt_of(20, 0))
        for round_ in range(3):
            relay.receiving.clear()
            answers = await asyncio.gather(
                *(relay.client.generate(prompt_of(60, 10 * round_ + i), stream=i == 1, **FIELDS) for i in range(4))
            )
            relay.receiving.set()
            assert all(answer.error is not None and not answer.token_ids for answer in answers)
            kinds = {answer.error["type"] for answer in answers if answer.error}
            assert kinds <= {"HandoffTimeoutError", "HandoffError", "HandoffRefusedError"}
            await asyncio.gather(*(answer_is_solo(relay, solo, prompt_of(60, 100 + i)) for i in range(4)))
        await relay.assert_baseline()


async def test_requests_wait_for_blocks_that_a_stalled_transfer_holds() -> None:
    """While A's transfer stands still its blocks stay A's: B waits, and both are right in the end."""
    solo = KIT.solo()
    async with running_relay(small(), WorkerPlan(KIT, chunk=8)) as relay:
        relay.valve.allow(6)
        first = asyncio.create_task(answer_is_solo(relay, solo, prompt_of(100, 1)))
        await relay.valve.wait_exhausted()
        second = asyncio.create_task(answer_is_solo(relay, solo, prompt_of(100, 2)))

        async def second_waits() -> bool:
            return relay.decode.core.engine.load().waiting == 1

        await until(second_waits)
        relay.valve.open()
        await asyncio.gather(first, second)
        await relay.assert_baseline()


async def test_who_stays_in_a_full_cluster_is_untouched() -> None:
    """sgl-project/sglang#24527: eight clients leave at random moments around one who stays; D has room for one."""
    rng, solo = random.Random(4), KIT.solo()
    async with running_relay(small(), WorkerPlan(KIT, chunk=8)) as relay:

        async def leaving(index: int) -> None:
            request = start(relay.client, prompt_of(rng.randrange(1, 110), index), stream=rng.random() < 0.7)
            await asyncio.wait([request], timeout=rng.expovariate(1 / 0.02))
            await leave(request)

        for round_ in range(20):
            left = [asyncio.create_task(leaving(8 * round_ + i)) for i in range(8)]
            await answer_is_solo(relay, solo, prompt_of(100, round_))
            await asyncio.gather(*left)
        await relay.assert_baseline()
