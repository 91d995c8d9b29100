"""Requests that are generated from the OpenAPI documents, valid and not, against a running cluster.

Every answer must be one that its document describes, no server error, and no wrong data may be accepted. The tool is
run as its users run it, so that its version and ours agree on what a run is.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.cluster import Client, Cluster, JsonObject, running_cluster
from tests.e2e.test_disconnect import assert_baseline, invariants

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("schemathesis")]

CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance,negative_data_rejection"

#: Contexts and batches that end soon: what is generated here is requests, not text.
FLAGS = (
    *("--dtype", "float32", "--num-kv-blocks", "160", "--threads", "1", "--max-model-len", "32"),
    *("--max-n", "2", "--max-prompts", "2", "--admin-port", "0", "--debug-poison-kv"),
)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tiny_model, tmp_path_factory.mktemp("schemathesis"), *FLAGS) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(session, cluster.url)


async def run(url: str, folder: Path, phases: str, max_examples: int) -> int:
    """Runs the tool with a fixed seed; fails the test with its findings, or returns how many requests it made."""
    report = folder / "report.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("--checks", CHECKS, "--phases", phases, "--max-examples", str(max_examples)),
        *("--seed", "7", "--generation-database", "none", "--request-timeout", "30"),
        *("--report", "json", "--report-json-path", str(report), "--no-color", "--warnings", "off"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-20_000:]
    outcome: JsonObject = json.loads(report.read_text())
    assert outcome["complete"]
    assert outcome["operations"]["errored"] == 0
    num_cases: int = outcome["test_cases"]["generated"]
    return num_cases


async def assert_unharmed(client: Client, before: JsonObject) -> None:
    """The same processes, with nothing left over, and the canary's answer is what it was."""
    after = await client.json("/cluster")
    assert [worker["pid"] for worker in after["workers"]] == [worker["pid"] for worker in before["workers"]]
    await assert_baseline(client)
    assert await invariants(client) == []


async def canary(client: Client) -> list[int]:
    answer = await client.generate([5, 6, 7], max_tokens=4)
    assert answer.status == 200, answer.error
    return answer.token_ids


async def test_examples_are_served(client: Client) -> None:
    """Every example of the document, which the docs page shows too, is answered."""
    document = await client.json("/openapi.json")
    num_examples = 0
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in content.get("examples", {}).values():
            async with client.session.post(client.url + path, json=example["value"]) as response:
                answer = await response.text()
            assert response.status == 200, (path, answer)
            assert "error" not in answer, (path, answer)
            num_examples += 1
    assert num_examples >= 10


async def test_every_route_in_short(client: Client, tmp_path: Path) -> None:
    before, expected = await client.json("/cluster"), await canary(client)
    assert await run(client.url, tmp_path, "examples,fuzzing", 16) >= 150
    await assert_unharmed(client, before)
    assert await canary(client) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_thousands_of_requests(client: Client, tmp_path: Path) -> None:
    before, expected = await client.json("/cluster"), await canary(client)
    assert await run(client.url, tmp_path, "examples,coverage,fuzzing", 120) >= 2000
    await assert_unharmed(client, before)
    assert await canary(client) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_control_routes(client: Client, cluster: Cluster, tmp_path: Path) -> None:
    """They may pause the cluster and put it to sleep; what was paused can be resumed, and answers as before."""
    assert cluster.control_url is not None
    before, expected = await client.json("/cluster"), await canary(client)
    assert await run(cluster.control_url, tmp_path, "examples,coverage,fuzzing", 20) >= 100
    for path in ("/wake_up", "/resume"):
        async with client.session.post(cluster.control_url + path) as response:
            assert response.status == 200, await response.text()
    await assert_unharmed(client, before)
    assert await canary(client) == expected
