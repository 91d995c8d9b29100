"""New weights in the middle of 50 running streams, in each pause mode: every answer is consistent, nothing leaks."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest
import torch

from common.engine.solo import SoloRunner
from common.model.synthesize import synthesize
from common.pb import worker_pb2, worker_pb2_grpc
from common.sampling import SamplingParams
from tests.e2e.cluster import Answer, Client, Cluster, JsonObject, request_body, running_cluster, sse_events, until
from tests.e2e.conftest import FLAGS, TINY
from tests.e2e.oracle import assert_equals_solo, solo_runner
from tests.e2e.test_disconnect import assert_baseline
from tests.e2e.test_routing_rows import prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("weight-update")]

NUM_STREAMS = 50
MAX_TOKENS = 60
#: Labels in the order in which they come to be used; even ones name one checkpoint, odd ones the other.
LABELS = ("0", "1", "2", "3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By label: two checkpoints of one shape, in turns."""
    paths = [tmp_path_factory.mktemp(f"weights-{seed}") for seed in range(2)]
    for seed, path in enumerate(paths):
        synthesize("qwen3_moe", "tiny", seed, TINY, path)
    return {label: paths[int(label) % 2] for label in LABELS}


@pytest.fixture(scope="module")
def solos(models: dict[str, Path]) -> dict[str, SoloRunner]:
    pair = [solo_runner(models[label], torch.float32) for label in LABELS[:2]]
    return {label: pair[int(label) % 2] for label in LABELS}


@pytest.fixture(scope="module", params=["disaggregated", "aggregated"])
def cluster(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    flags = ("--mode", request.param, "--admin-port", "0", *FLAGS, "--max-num-batched-tokens", "48")
    with running_cluster(models[LABELS[0]], tmp_path_factory.mktemp("cluster"), *flags) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Client(session, cluster.url)


class Streams:
    """The 50 streams, and how many of them have had some tokens."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.prompts = [prompt_of(1 + 13 * i % 67, i) for i in range(NUM_STREAMS)]
        self.answers = [Answer(200) for _ in self.prompts]
        self.versions: list[list[JsonObject]] = [[] for _ in self.prompts]
        #: Those that were refused because the cluster was paused when they came, and tried again.
        self.late: set[int] = set()
        self._started = asyncio.Semaphore(0)

    async def run(self, index: int) -> None:
        async def served() -> bool:
            return await self._is_served(index)

        await until(served, within_s=100)

    async def _is_served(self, index: int) -> bool:
        """Sends the request once; False if the cluster was paused."""
        body = request_body(self.prompts[index], stream=True, max_tokens=MAX_TOKENS, ignore_eos=True)
        answer = self.answers[index]
        async with self._client.session.post(f"{self._client.url}/inference/v1/generate", json=body) as response:
            if response.status == 503:
                self.late.add(index)
                return False
            assert response.status == 200, await response.text()
            events = [event async for event in self._read(response, index)]
        assert events[-1] == "[DONE]"
        assert answer.finish_reason is not None
        return True

    async def _read(self, response: aiohttp.ClientResponse, index: int) -> AsyncIterator[str]:
        async for event in sse_events(response):
            if event != "[DONE]":
                [choice] = json.loads(event)["choices"]
                before = len(self.answers[index].token_ids)
                self.answers[index].take(choice)
                self.versions[index] = choice["weight_versions"] or self.versions[index]
                if before < 3 <= len(self.answers[index].token_ids):
                    self._started.release()
            yield event

    async def some_started(self) -> None:
        """Half of them are well under way, so that every phase of a request is there at once."""
        for _ in range(NUM_STREAMS // 2):
            await self._started.acquire()


async def control(cluster: Cluster, client: Client, path: str, body: JsonObject | None = None) -> JsonObject:
    async with client.session.post(f"{cluster.control_url}{path}", json=body) as response:
        payload: JsonObject = await response.json()
        assert response.status == 200, payload
        return payload


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_update_in_the_middle_of_streams(
    cluster: Cluster, client: Client, models: dict[str, Path], solos: dict[str, SoloRunner], mode: str
) -> None:
    old = await version_of(client)
    new = LABELS[LABELS.index(old) + 1]
    streams = Streams(client)
    async with asyncio.TaskGroup() as group:
        for index in range(NUM_STREAMS):
            group.create_task(streams.run(index))
        await streams.some_started()
        await control(cluster, client, f"/pause?mode={mode}")
        assert await refused(client) == "1"
        await control(cluster, client, "/update_weights", {"path": str(models[new])})
        await control(cluster, client, "/resume")
    for index, prompt in enumerate(streams.prompts):
        labels = (new, new) if index in streams.late else (old, new)
        check(streams.answers[index], streams.versions[index], prompt, solos, mode, labels)
    assert await version_of(client) == new
    await check_afterwards(client, solos[new])
    await assert_baseline(client)
    await assert_no_violations(client)


async def version_of(client: Client) -> str:
    """The label of the weights that every worker uses."""
    [version] = {worker["weight_version"] for worker in (await client.json("/cluster"))["workers"]}
    return str(version)


async def refused(client: Client) -> str | None:
    """A request to the paused cluster; returns Retry-After."""
    async with client.session.post(f"{client.url}/inference/v1/generate", json=request_body([5, 6, 7])) as response:
        assert (response.status, (await response.json())["error"]["type"]) == (503, "PausedError")
        return response.headers.get("Retry-After")


def check(
    answer: Answer,
    versions: list[JsonObject],
    prompt: list[int],
    solos: dict[str, SoloRunner],
    mode: str,
    labels_in_use: tuple[str, str],
) -> None:
    """The answer's spans cover its tokens; what one version produced is what that version's solo run says."""
    num_tokens = len(answer.token_ids)
    ends = [0, *(span["end"] for span in versions)]
    assert [span["start"] for span in versions] == ends[:-1]
    assert ends[-1] == num_tokens
    labels = [span["version"] for span in versions]
    if not num_tokens:
        assert (mode, answer.finish_reason) == ("abort", "abort")  # rows of the prompt that went ahead are void
        return
    assert len(answer.rows) == len(prompt) + num_tokens - 1
    old, new = labels_in_use
    assert labels in {"abort": ([old],), "wait": ([old],), "keep": ([old], [new], [old, new])}[mode]
    if mode != "abort":
        assert (answer.finish_reason, num_tokens) == ("length", MAX_TOKENS)
    # The tokens of the first version, and every row that its forward passes wrote, are those of its solo run.
    first = versions[0]["end"]
    expected = solos[labels[0]].run(prompt, SamplingParams(max_tokens=first, temperature=0.0, ignore_eos=True))
    assert answer.token_ids[:first] == [token.token_id for token in expected.tokens]
    assert expected.rows_TLK is not None
    assert np.array_equal(answer.rows[: len(expected.rows_TLK)], expected.rows_TLK)


async def check_afterwards(client: Client, solo: SoloRunner) -> None:
    """Requests that came after the update, the same prompts as before among them, see the new weights only."""
    rng = random.Random(3)
    for index in range(6):
        prompt = (
            prompt_of(1 + 13 * index % 67, index) if index % 2 else prompt_of(rng.randrange(1, 60), rng.randrange(99))
        )
        answer = await client.generate(prompt, max_tokens=8, logprobs=2)
        assert_equals_solo(answer, solo, prompt, max_tokens=8, logprobs=2)


async def assert_no_violations(client: Client) -> None:
    for worker in (await client.json("/cluster"))["workers"]:
        async with grpc.aio.insecure_channel(worker["address"]) as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            assert list((await stub.CheckInvariants(worker_pb2.CheckInvariantsRequest())).violations) == []
