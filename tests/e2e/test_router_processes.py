"""`moerelay up --router-processes 4` on a real model: one cluster to its clients, with the bytes of one process."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from common.model.synthesize import synthesize
from router.text.tokenizer import load_tokenizer
from tests.e2e.cluster import Answer, Client, Cluster, JsonObject, running_cluster, until
from tests.e2e.conftest import FLAGS, TINY
from tests.unit.router.scrapes import nothing_falls

NUM_REQUESTS = 16
#: What is counted of each of them, beside others.
COUNTERS = ("router_requests", "generation_tokens")
#: Tokens of streams that are still there when somebody has looked, as many as the context takes.
LONG = 1000


@pytest.fixture(scope="module")
def four_processes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Stopped with SIGTERM, which must end it with code 0."""
    folder = tmp_path_factory.mktemp("processes")
    with running_cluster(tiny_model, folder, *FLAGS, "--router-processes", "4") as cluster:
        yield cluster


@pytest.mark.cluster
@pytest.mark.xdist_group("router-processes")
async def test_four_processes_answer_as_one(four_processes: Cluster, client: Client) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        both = Client(session, four_processes.url)
        prompts = [[3 + i, 5, 7, 11] for i in range(NUM_REQUESTS)]
        before = [await both.metric(f"moerelay_{name}_total") for name in COUNTERS]
        answers = await asyncio.gather(*(both.generate(prompt, max_tokens=6, logprobs=1) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert _said(answer) == _said(await client.generate(prompt, max_tokens=6, logprobs=1))

        async def counted() -> bool:
            requests, tokens = [await both.metric(f"moerelay_{name}_total") for name in COUNTERS]
            num_tokens = sum(len(answer.token_ids) for answer in answers)
            return (requests - before[0], tokens - before[1]) == (NUM_REQUESTS, num_tokens)

        await until(counted)  # counters lag behind the last byte of an answer
        assert await both.metric("moerelay_worker_up") == 2


@pytest.mark.cluster
@pytest.mark.xdist_group("router-processes")
async def test_an_abort_reaches_the_other_process(four_processes: Cluster) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        both = Client(session, four_processes.url)
        names = [f"long-{i}" for i in range(NUM_REQUESTS)]
        async with asyncio.TaskGroup() as group:
            options: JsonObject = {"stream": True, "max_tokens": 100, "ignore_eos": True}
            running = [group.create_task(both.generate([3, 5, 7], request_id=name, **options)) for name in names]
            found: set[str] = set()

            async def all_found() -> bool:
                async with session.post(
                    f"{both.url}/inference/v1/abort_requests", json={"request_ids": names}
                ) as response:
                    if response.status == 200:
                        found.update((await response.json())["aborted"])
                return all(task.done() for task in running)

            await until(all_found)
        ends = [task.result().finish_reason for task in running]
        # One that was faster than the abort ended by itself.
        assert {name for name, end in zip(names, ends, strict=True) if end == "abort"} <= found
        assert "abort" in ends

        async def none_left() -> bool:
            return bool((await both.json("/cluster"))["router"]["in_flight"] == 0)

        await until(none_left)


@pytest.mark.cluster
@pytest.mark.xdist_group("router-processes")
async def test_nobody_is_forked(four_processes: Cluster, disaggregated: Cluster, tiny_model: Path) -> None:
    """exo#553, tokenizers#187, Megatron-Bridge#5328: a fork would copy the locks of gRPC's and the tokenizer's threads.

    Every process is a program of its own from its first instruction on, with one router process and with several.
    """
    tokenizer = load_tokenizer(tiny_model)
    assert tokenizer is not None
    for cluster in (disaggregated, four_processes):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as session:
            client = Client(session, cluster.url)
            requests = (client.generate([3 + i % 200, 5], stream=i % 2 == 0, max_tokens=4) for i in range(100))
            assert all(answer.error is None for answer in await asyncio.gather(*requests))
            # A grammar is checked by a child of a router process, which holds a tokenizer and its threads by now.
            grammar = {"structured_outputs": {"regex": "a+"}, "max_tokens": 2}
            answers = [await client.generate([5, 6], sampling_params=grammar) for _ in range(4)]
        for answer in answers:
            assert re.fullmatch("a+", tokenizer.decode(answer.token_ids, True))
        assert "fork" not in cluster.log.read_text().lower()
        children = psutil.Process(cluster.process.pid).children(recursive=True)
        assert any("router.text.grammar_child" in child.cmdline() for child in children)
        for child in children:
            parent = child.parent()
            assert parent is not None
            assert child.cmdline() != parent.cmdline()


class Streams:
    """Streams, of which some are lost with the process that serves them."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session
        self.client = Client(session, cluster.url)
        self.num_sent = 0
        self.ended: list[Answer] = []

    async def lose_some(self) -> None:
        """Kills a process. All stand still then, so that it is certain which of them it takes with it."""
        async with asyncio.TaskGroup() as group:
            for i in range(NUM_REQUESTS):
                group.create_task(self._ask([3 + i, 5, 7]))
            self.num_sent += NUM_REQUESTS
            await until(lambda: self._counted("moerelay_router_in_flight", NUM_REQUESTS))
            await self._control("/pause?mode=keep")
            await self.until_counted()
            victim = self._busiest()
            victim.kill()
            await asyncio.to_thread(victim.wait, 30)
            await until(lambda: self._counted("moerelay_router_processes", 3), 60)
            await self._control("/resume")

    async def until_counted(self) -> None:
        """Metrics lag behind the last byte of a stream; this is the last one of a request."""
        await until(lambda: self._counted("moerelay_e2e_request_latency_seconds_count", len(self.ended)))

    async def _ask(self, prompt: list[int]) -> None:
        with suppress(aiohttp.ClientError):
            options: JsonObject = {"stream": True, "max_tokens": LONG, "ignore_eos": True}
            self.ended.append(await self.client.generate(prompt, **options))

    async def _counted(self, name: str, value: float) -> bool:
        return await self.client.metric(name) == value

    async def _control(self, path: str) -> None:
        async with self._session.post(f"{self._cluster.control_url}{path}") as response:
            assert response.status == 200

    def _busiest(self) -> psutil.Process:
        """The router process with the most connections."""
        port = int(self._cluster.url.rpartition(":")[2])

        def num_connections(child: psutil.Process) -> int:
            return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr[1] == port for c in child.net_connections("tcp"))

        children = psutil.Process(self._cluster.process.pid).children(recursive=True)
        return max((child for child in children if "router.processes" in child.cmdline()), key=num_connections)


@pytest.mark.cluster
@pytest.mark.xdist_group("router-processes")
async def test_metrics_stay_true_when_processes_are_killed(tmp_path: Path) -> None:
    """kill -9 of processes that serve streams: what they have counted stays, and nothing is counted twice."""
    synthesize("qwen3_moe", "tiny", 7, TINY | {"max_position_embeddings": 1024}, tmp_path / "m")
    flags = ("--dtype", "float32", "--num-kv-blocks", "1024", "--threads", "1", "--router-processes", "3")
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    with running_cluster(tmp_path / "m", tmp_path, *flags, "--admin-port", "0") as cluster:
        async with aiohttp.ClientSession(connector=connector) as session:
            streams = Streams(cluster, session)
            async with nothing_falls(session, cluster.url):
                for _ in range(2):
                    await streams.lose_some()
                await streams.until_counted()
            num_ended = len(streams.ended)
            assert 0 < num_ended < streams.num_sent
            assert {(a.finish_reason, len(a.token_ids)) for a in streams.ended} == {("length", LONG)}
            for _ in range(6):
                assert await streams.client.metric("moerelay_router_requests_total") == num_ended
                assert await streams.client.metric("moerelay_request_success_total") == num_ended
                assert await streams.client.metric("moerelay_generation_tokens_total") == LONG * num_ended
                assert await streams.client.metric("moerelay_prompt_tokens_total") == 3 * num_ended
                assert await streams.client.metric("moerelay_e2e_request_latency_seconds_count") == num_ended


def _said(answer: Answer) -> tuple[list[int], list[object], bytes, str | None]:
    return answer.token_ids, [*answer.logprobs], answer.rows.tobytes(), answer.finish_reason
