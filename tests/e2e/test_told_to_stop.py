"""SIGTERM under load, on real processes: llm-d#927, vllm#24885, #43208, data-fair#473.

Workers and router finish what they have, say at once that they will go, take what still comes for a while, and end in
their time. A second signal does not wait.
"""

import asyncio
from collections.abc import Awaitable, Sequence

import aiohttp
import pytest

from tests.e2e.cluster import Answer, Client
from tests.e2e.fleet import Fleet, Process, states, until_not_serving, until_status
from tests.e2e.long_requests import LONG, assert_ended, generate, handed_over, until_decoding, until_handing_over

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("dead_workers")]

NUM_STREAMS = 10
#: So many long prompts keep prefill workers busy for seconds; few tokens each.
NUM_PROMPTS, LONG_PROMPT, FEW = 40, 1800, 4
#: For whoever has nothing left to finish: far less than --drain-timeout-s, and a busy machine has to manage, too.
EXIT_S = 25.0

WHO = pytest.mark.parametrize("who", ["decode", "prefill", "router"])


def leaver(fleet: Fleet, who: str) -> Process:
    return fleet.router if who == "router" else fleet.of("decode" if who == "decode" else "prefill")[0]


async def under_way(client: Client, who: str) -> tuple[list[asyncio.Task[Answer]], int]:
    """Streams on the one that is to leave, among others, and how many tokens each of them is to have."""
    if who == "prefill":
        before = await handed_over(client)
        requests = [generate(client, i, FEW, length=LONG_PROMPT) for i in range(NUM_PROMPTS)]
        streams = [asyncio.create_task(request) for request in requests]
        await until_handing_over(client, before)
        return streams, FEW
    streams = [asyncio.create_task(generate(client, i, LONG)) for i in range(NUM_STREAMS)]
    await until_decoding(client, len(streams))
    return streams, LONG


async def until_it_says_so(client: Client, leaving: Process) -> None:
    """To load balancers and to the router, while its port still accepts connections."""
    if leaving.role is None:
        await until_status(client, "/ready", 503)
        await until_status(client, "/live", 200)
    else:
        await until_not_serving(leaving)


@WHO
async def test_whoever_is_told_to_stop_finishes_what_it_has(fleet: Fleet, fleet_client: Client, who: str) -> None:
    leaving = leaver(fleet, who)
    streams, num_tokens = await under_way(fleet_client, who)
    leaving.terminate()
    await until_it_says_so(fleet_client, leaving)
    assert not all(stream.done() for stream in streams), "SIGTERM came too late to cut any"
    # A router takes these itself (--pre-stop-s), for a worker another one does.
    late = await asyncio.gather(*(generate(fleet_client, 50 + i, 4) for i in range(10)))
    assert not assert_ended(late, 4)[1]
    assert not assert_ended(await asyncio.gather(*streams), num_tokens)[1]
    assert await asyncio.to_thread(leaving.popen.wait, EXIT_S) == 0, leaving.last_lines()
    if leaving.role is not None:
        assert (await states(fleet_client)).get(leaving.name) != "healthy"


@WHO
async def test_a_second_signal_does_not_wait(fleet: Fleet, fleet_client: Client, who: str) -> None:
    """Whoever was served there gets an error, and nobody else does."""
    leaving = leaver(fleet, who)
    streams, num_tokens = await under_way(fleet_client, who)
    leaving.terminate()
    await until_it_says_so(fleet_client, leaving)
    leaving.terminate()
    assert await asyncio.to_thread(leaving.popen.wait, EXIT_S) == 0, leaving.last_lines()
    complete, num_failed = await ends(streams, num_tokens)
    assert num_failed
    assert len(complete) + num_failed == len(streams)
    assert bool(complete) is (who != "router"), "the other worker finishes what it has"


async def ends(streams: Sequence[Awaitable[Answer]], num_tokens: int) -> tuple[list[Answer], int]:
    """Answers that are complete, and how many streams ended in an error or broke off."""
    outcomes = await asyncio.gather(*streams, return_exceptions=True)
    answers = [outcome for outcome in outcomes if isinstance(outcome, Answer)]
    broken = [outcome for outcome in outcomes if isinstance(outcome, aiohttp.ClientError)]
    assert len(answers) + len(broken) == len(outcomes), outcomes
    complete, failed = assert_ended(answers, num_tokens)
    return complete, len(failed) + len(broken)
