"""Real clusters with objectives: who would get a first token too late is told so at once, and everybody else is served.

And what the workers measure meanwhile is what `moerelay advise` plans with.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from common.engine.solo import SoloRunner
from deploy.advise.advice import Workload
from deploy.advise.command import measured, report
from deploy.client import ClusterClient
from tests.e2e.cluster import Answer, Client, Cluster, JsonObject, request_body, running_cluster, until
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.test_disconnect import assert_baseline
from tests.e2e.test_routing_rows import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("goodput")]

MODES = {"aggregated": ("--mode", "aggregated"), "disaggregated": ("--prefill", "1")}
#: An idle worker refuses nobody, whatever the objective; and no machine computes two prompts in this time.
FLAGS = ("--slo-ttft", "0.1ms", "--slo-itl", "10s", "--dtype", "float32", "--threads", "1")
NUM_PROMPT = 100
NUM_TOKENS = 12
#: The first rounds only tell the workers what prompts take; a crowd that comes at once does the rest.
MAX_ROUNDS = 20
COUNTERS = (
    "moerelay_requests_refused_total",
    "moerelay_router_errors_total",
    "moerelay_slo_met_total",
    "moerelay_slo_missed_total",
)


@pytest.fixture(scope="module", params=MODES)
def cluster(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    flags = (*MODES[request.param], *FLAGS, "--max-num-batched-tokens", "16", "--debug-poison-kv")
    with running_cluster(tiny_model, tmp_path_factory.mktemp("goodput"), *flags) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(session, cluster.url)


class Told(NamedTuple):
    """What a client got."""

    status: int
    body: JsonObject
    retry_after: str | None


async def ask(client: Client, prompt: list[int]) -> Told:
    body = request_body(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
        return Told(response.status, await response.json(), response.headers.get("Retry-After"))


async def test_hopeless_requests_are_refused_and_all_others_are_served(client: Client, solo: SoloRunner) -> None:
    served: list[tuple[list[int], Told]] = []
    refused: list[Told] = []
    before = {name: await client.metric(name) for name in COUNTERS}
    for number in range(MAX_ROUNDS):
        prompts = [prompt_of(NUM_PROMPT, 100 * number + i) for i in range(16)]
        told = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        served += [pair for pair in zip(prompts, told, strict=True) if pair[1].status == 200]
        refused += [each for each in told if each.status != 200]
        if len(refused) >= 3:
            break
    assert len(refused) >= 3
    for each in refused:
        assert (each.status, each.body["error"]["type"]) == (429, "RateLimitError")
        assert "--slo-ttft" in each.body["error"]["message"]
        assert each.retry_after is not None
        assert int(each.retry_after) >= 1
    for prompt, each in served:
        answer = Answer(200)
        answer.take(each.body["choices"][0])
        assert_equals_solo(answer, solo, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    await assert_baseline(client)
    # Nobody can have had a first token in a tenth of a millisecond, and no step takes ten seconds.
    added = [await client.metric(name) - before[name] for name in COUNTERS]
    assert added == [len(refused), len(refused), len(served), 2 * len(served)]


async def test_the_cluster_tells_what_steps_take_and_advice_follows_from_it(client: Client, cluster: Cluster) -> None:
    for number in range(8):  # prompts of seven steps
        await client.generate(prompt_of(NUM_PROMPT, 5000 + number), max_tokens=NUM_TOKENS, ignore_eos=True)

    async def all_steps_are_told() -> bool:
        workers = (await client.json("/cluster"))["workers"]
        return all(max(w["step_times"][f"{kind}_steps"] for w in workers) >= 56 for kind in ("prompt", "decode"))

    await until(all_steps_are_told)
    workers = (await client.json("/cluster"))["workers"]
    assert {w["max_num_batched_tokens"] for w in workers} == {16}
    profile = await measured(ClusterClient(cluster.url))
    lines = list(report(profile, Workload(64, 16, 10.0, 10.0), rate=0.01))
    assert lines[3].startswith("for 0.01 requests/s: 1 prefill and 1 decode workers")
    assert lines[4].endswith("100% in time for the first token, 100% between tokens: goodput 0.01 requests/s")
    assert await client.metric("moerelay_engine_step_seconds_total") > 0
    assert await client.metric("moerelay_engine_step_predicted_seconds_total") > 0
