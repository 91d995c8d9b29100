"""`moerelay up --router-processes 2` on a real model: one cluster to its clients, with the bytes of one process."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.cluster import Answer, Client, Cluster, JsonObject, running_cluster, until
from tests.e2e.conftest import FLAGS

NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def two_processes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Stopped with SIGTERM, which must end it with code 0."""
    folder = tmp_path_factory.mktemp("processes")
    with running_cluster(tiny_model, folder, *FLAGS, "--router-processes", "2") as cluster:
        yield cluster


@pytest.mark.cluster
@pytest.mark.xdist_group("router-processes")
async def test_two_processes_answer_as_one(two_processes: Cluster, client: Client) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        both = Client(session, two_processes.url)
        prompts = [[3 + i, 5, 7, 11] for i in range(NUM_REQUESTS)]
        answers = await asyncio.gather(*(both.generate(prompt, max_tokens=6, logprobs=1) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert _said(answer) == _said(await client.generate(prompt, max_tokens=6, logprobs=1))
        assert await both.metric("moerelay_router_requests_total") == NUM_REQUESTS
        assert await both.metric("moerelay_generation_tokens_total") == sum(len(a.token_ids) for a in answers)
        assert await both.metric("moerelay_worker_up") == 2


@pytest.mark.cluster
@pytest.mark.xdist_group("router-processes")
async def test_an_abort_reaches_the_other_process(two_processes: Cluster) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        both = Client(session, two_processes.url)
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

            await until(all_found, 30)
        ends = [task.result().finish_reason for task in running]
        # One that was faster than the abort ended by itself.
        assert {name for name, end in zip(names, ends, strict=True) if end == "abort"} <= found
        assert "abort" in ends
        assert (await both.json("/cluster"))["router"]["in_flight"] == 0


def _said(answer: Answer) -> tuple[list[int], list[object], bytes, str | None]:
    return answer.token_ids, [*answer.logprobs], answer.rows.tobytes(), answer.finish_reason
