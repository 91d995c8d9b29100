"""Real clusters, one per worker process of the test run, shared by the tests of one group."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import torch

from common.engine.solo import SoloRunner
from common.model.synthesize import synthesize
from tests.e2e.cluster import Client, Cluster, running_cluster
from tests.e2e.fleet import Fleet, client_of, running_fleet, until_healthy
from tests.e2e.oracle import solo_runner

#: The fixture of the fault catalogue: 2 layers, 8 experts, top-2, 300 ids, context 128, EOS 2.
TINY = {
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

#: Freed blocks hold NaN, so that stale data can never pass by luck; chunks of 16, so that prompts take several.
FLAGS = (
    *("--dtype", "float32", "--num-kv-blocks", "160", "--max-num-batched-tokens", "16"),
    *("--debug-poison-kv", "--threads", "1"),
)


#: Of a test and the start of its cluster together: what they wait for inside fails before, and says what it waited for.
TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    synthesize("qwen3_moe", "tiny", 7, TINY, path)
    return path


@pytest.fixture(scope="session")
def disaggregated(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tiny_model, tmp_path_factory.mktemp("pd"), *FLAGS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def solo(tiny_model: Path) -> SoloRunner:
    return solo_runner(tiny_model, torch.float32)


@pytest.fixture
async def client(disaggregated: Cluster) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield Client(session, disaggregated.url)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two prefill and two decode workers, shared by tests that end them; all in one group, so that there is one.

    New requests are taken for so long after SIGTERM that a test gets to sending some.
    """
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("fleet")
    synthesize("qwen3_moe", "tiny", 7, TINY | {"max_position_embeddings": 2048}, model / "m")
    with running_fleet(model / "m", folder, "--placement", "round_robin", "--pre-stop-s", "8") as running:
        yield running


@pytest.fixture
async def fleet_client(fleet: Fleet) -> AsyncIterator[Client]:
    """Once everybody is there whom an earlier test has ended."""
    fleet.complete()
    async with client_of(fleet) as client:
        await until_healthy(client, *fleet.workers)
        yield client
