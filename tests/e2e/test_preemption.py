"""Real clusters whose decode workers have blocks for two of the requests that they get at once.

With room for copies of what is taken from a sequence, and without, so that everything is computed again.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from common.engine.solo import SoloRunner
from common.model.synthesize import synthesize
from common.sampling import SamplingParams
from tests.e2e.cluster import Answer, Client, Cluster, JsonObject, running_cluster, until
from tests.e2e.conftest import TINY
from tests.e2e.oracle import assert_equals_solo, solo_runner
from tests.e2e.test_disconnect import assert_baseline, invariants
from tests.e2e.test_routing_rows import assert_delta_rule, prompt_of

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("preemption")]

#: Blocks of 16 positions; one request may fill 8.
NUM_BLOCKS = 12
MODES = {"aggregated": ("--mode", "aggregated"), "two prefill workers": ("--prefill", "2")}
SWAP = {"swapped": "1GiB", "recomputed": "0"}

FORMS: list[JsonObject] = [{}, *({"stream": True, "stream_options": {"routed_experts": f}} for f in ("delta", "final"))]
DELTA = 1

Setup = tuple[str, str]


SETUPS = [
    ("aggregated", "recomputed"),
    ("two prefill workers", "swapped"),
    pytest.param(("aggregated", "swapped"), marks=pytest.mark.slow),
    pytest.param(("two prefill workers", "recomputed"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SETUPS, ids=" ".join)
def setup(request: pytest.FixtureRequest) -> Setup:
    """The mode, and what happens to those who lose their blocks."""
    chosen: Setup = request.param
    return chosen


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its steps take some milliseconds, so that a request is still under way when the next ones arrive."""
    path = tmp_path_factory.mktemp("models") / "slow"
    synthesize("qwen3_moe", "tiny", 7, TINY | {"num_hidden_layers": 40, "moe_intermediate_size": 512}, path)
    return path


@pytest.fixture(scope="module")
def solo(slow_model: Path) -> SoloRunner:
    return solo_runner(slow_model, torch.float32)


@pytest.fixture(scope="module")
def cluster(setup: Setup, slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    mode, kind = setup
    flags = (
        *(*MODES[mode], "--dtype", "float32", "--num-kv-blocks", str(NUM_BLOCKS), "--max-num-batched-tokens", "16"),
        *("--swap-space", SWAP[kind], "--debug-poison-kv", "--threads", "1", "--log-level", "debug"),
    )
    with running_cluster(slow_model, tmp_path_factory.mktemp("preemption"), *flags) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(session, cluster.url)


class Preemptions:
    """Counts since it was made."""

    def __init__(self, client: Client, before: dict[str, float]) -> None:
        self._client = client
        self._before = before

    @classmethod
    async def begin(cls, client: Client) -> "Preemptions":
        return cls(client, await _counts(client))

    async def since(self) -> dict[str, float]:
        return {kind: now - self._before[kind] for kind, now in (await _counts(self._client)).items()}


async def _counts(client: Client) -> dict[str, float]:
    return {kind: await client.metric(f"moerelay_preemptions_{kind}_total") for kind in SWAP}


async def assert_nothing_left(client: Client) -> None:
    await assert_baseline(client)
    assert await client.metric("moerelay_swap_bytes_used") == 0
    assert await client.metric("moerelay_requests_preempted") == 0
    assert await invariants(client) == []


async def test_every_row_survives_preemption(client: Client, solo: SoloRunner, setup: Setup) -> None:
    """vllm-project/vllm#39917, #39568: 6 requests of 89 positions each in 192, whole, as `delta` and as `final`."""
    preemptions = await Preemptions.begin(client)
    prompts = [prompt_of(30, seed) for seed in range(6)]
    fields: JsonObject = {"max_tokens": 60, "ignore_eos": True, "logprobs": 2}
    answers = await asyncio.gather(
        *(client.generate(prompt, **fields, **FORMS[index % 3]) for index, prompt in enumerate(prompts))
    )
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert_equals_solo(answer, solo, prompt, **fields)
        assert (len(answer.token_ids), len(answer.rows)) == (60, 89)
        if index % 3 == DELTA:
            assert_delta_rule(answer, 30)
    counts = await preemptions.since()
    assert counts[setup[1]] > 0
    assert sum(counts.values()) == counts[setup[1]]
    await assert_nothing_left(client)


async def test_one_request_is_preempted_twice(client: Client, cluster: Cluster, solo: SoloRunner, setup: Setup) -> None:
    """sgl-project/sglang#25372, #40730, LMCache#1361: each time its history is replaced, not appended to."""
    prompt, urgent_prompts = prompt_of(16, 100), [prompt_of(30, 101), prompt_of(30, 102)]
    fields: JsonObject = {"max_tokens": 110, "ignore_eos": True, "logprobs": 1, "temperature": 1.0, "seed": 3}
    urgent_fields: JsonObject = {"max_tokens": 60, "ignore_eos": True}
    # The others may be so late that it has ended when they come, or so slow that they need its blocks afterwards.
    for attempt in range(10):
        victim = asyncio.create_task(
            client.generate(prompt, stream=attempt % 2 == 0, priority=5, request_id=f"twice-{attempt}", **fields)
        )
        urgent: list[Answer] = []
        for _ in range(2):
            await until_running(client, victim)
            urgent += await asyncio.gather(*(client.generate(each, **urgent_fields) for each in urgent_prompts))
        for each, answer in zip(urgent_prompts * 2, urgent, strict=True):
            assert_equals_solo(answer, solo, each, **urgent_fields)
        assert_equals_solo(await victim, solo, prompt, **fields)
        await assert_nothing_left(client)
        was_twice = preempted(cluster, f"twice-{attempt}").total() >= 2
        if await next_turn_was_cached(client, solo, prompt, await victim) and was_twice:
            break
    else:
        raise AssertionError("the others were late, or slow, each time")
    if setup[0] == "two prefill workers":
        computed = await by_worker(client, "moerelay_prompt_tokens_computed_total")
        assert sum(count > 0 for labels, count in computed.items() if 'role="prefill"' in labels) == 2


async def next_turn_was_cached(client: Client, solo: SoloRunner, prompt: list[int], answer: Answer) -> bool:
    """A conversation goes on exactly; whether with the blocks that the sequence got after its preemption, and the rows
    in them."""
    before = await decode_hits(client)
    prompt = [*prompt, *answer.token_ids, 3]
    assert_equals_solo(await client.generate(prompt, max_tokens=1), solo, prompt, max_tokens=1)
    # 125 positions had been forwarded: 7 full blocks.
    return await decode_hits(client) - before == 112


async def decode_hits(client: Client) -> float:
    """Prompt tokens found in the prefix caches of those workers that decode."""
    found = await by_worker(client, "moerelay_prefix_cache_hit_tokens_total")
    return sum(count for labels, count in found.items() if 'role="prefill"' not in labels)


async def until_running(client: Client, victim: "asyncio.Task[Answer]") -> None:
    """The only request has its blocks, or has ended."""

    async def running() -> bool:
        return victim.done() or await client.metric("moerelay_requests_running") == 1

    await until(running)


def preempted(cluster: Cluster, name: str) -> Counter[str]:
    """How often each request whose id contains `name` lost its blocks, as the workers logged it."""
    lines = [line for line in cluster.log.read_text().splitlines() if "preempted" in line]
    return Counter(found[0] for line in lines if (found := re.search(rf"{name}\d*", line)))


async def by_worker(client: Client, name: str) -> dict[str, float]:
    """The samples of a metric by their labels."""
    async with client.session.get(f"{client.url}/metrics") as response:
        text = await response.text()
    return {m[1]: float(m[2]) for m in re.finditer(rf"^{name}{{(.*)}} (\S+)$", text, re.M)}


async def test_a_pool_of_one_and_a_half_requests_does_not_thrash(client: Client, solo: SoloRunner) -> None:
    """vllm-project/vllm#25538: 4 requests of 8 blocks each."""
    preemptions = await Preemptions.begin(client)
    prompts = [prompt_of(16, 200 + index) for index in range(4)]
    fields: JsonObject = {"max_tokens": 112, "ignore_eos": True}
    answers = await asyncio.gather(*(client.generate(prompt, **fields) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_equals_solo(answer, solo, prompt, **fields)
    assert 0 < sum((await preemptions.since()).values()) < 20
    await assert_nothing_left(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_keeps_what_preempted_requests_have(
    client: Client, cluster: Cluster, solo: SoloRunner, stream: bool
) -> None:
    """sgl-project/sglang#11673, vllm-project/vllm#22197: tokens, logprobs and rows of equal spans."""
    for attempt in range(10):  # all that were preempted may have ended when the abort comes
        if await _abort_in_mid_preemption(client, cluster, solo, f"abort-{stream}-{attempt}", stream=stream):
            return
    raise AssertionError("the abort was late each time")


async def _abort_in_mid_preemption(
    client: Client, cluster: Cluster, solo: SoloRunner, prefix: str, *, stream: bool
) -> bool:
    """Whether one that had been preempted was aborted with what it had."""
    prompts = {f"{prefix}-{index}": prompt_of(20, 300 + index) for index in range(8)}
    fields: JsonObject = {"max_tokens": 100, "ignore_eos": True, "logprobs": 1}
    preemptions = await Preemptions.begin(client)
    requests = {
        name: asyncio.ensure_future(client.generate(prompt, stream=stream, request_id=name, **fields))
        for name, prompt in prompts.items()
    }

    async def begun() -> bool:
        return sum((await preemptions.since()).values()) > 0

    await until(begun)
    async with client.session.post(
        f"{client.url}/inference/v1/abort_requests", json={"request_ids": list(prompts)}
    ) as response:
        assert response.status == 200, await response.text()
    answers = {name: await request for name, request in requests.items()}
    for name, answer in answers.items():
        assert_is_beginning(answer, solo, prompts[name])
    await assert_nothing_left(client)
    victims = preempted(cluster, f"{prefix}-")
    return any(answers[name].finish_reason == "abort" and answers[name].token_ids for name in victims)


def assert_is_beginning(answer: Answer, solo: SoloRunner, prompt: list[int]) -> None:
    """Of the solo run of the request: so many tokens, their logprobs, and the rows that belong to them."""
    num_tokens = len(answer.token_ids)
    assert answer.finish_reason == ("abort" if num_tokens < 100 else "length")
    assert len(answer.logprobs) == num_tokens
    params = SamplingParams(max(1, num_tokens), temperature=0.0, ignore_eos=True, logprobs=1)
    expected = solo.run(prompt, params, 0)
    tokens = expected.tokens[:num_tokens]
    assert answer.token_ids == [token.token_id for token in tokens]
    told = [token.logprob.logprob for token in tokens if token.logprob is not None]
    assert [np.float32(entry["logprob"]) for entry in answer.logprobs] == [np.float32(value) for value in told]
    assert expected.rows_TLK is not None
    rows_TLK = np.concatenate([expected.rows_TLK[:0], *answer.row_parts])
    # A stream may have brought rows of a prompt whose first token never came.
    num_rows = 20 + num_tokens - 1 if num_tokens else len(rows_TLK)
    assert np.array_equal(rows_TLK, expected.rows_TLK[:num_rows])
