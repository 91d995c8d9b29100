"""The stack that the tests of this folder share, and what its answers must be."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from common.engine.solo import SoloRunner
from tests.compose.load import Expected
from tests.compose.stack import Stack
from tests.e2e.cluster import Client
from tests.e2e.oracle import solo_runner


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`docker-compose up` as a user would say it: one router, one prefill and one decode worker."""
    if not os.environ.get("COMPOSE_TEST"):
        pytest.skip("needs a Docker engine and the images; scripts/compose_test.sh brings both")
    stack = Stack(tmp_path_factory.mktemp("keys"))
    stack.down()
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="session")
def solo(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> SoloRunner:
    """The checkpoint that the stack made for itself, in this process."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    stack.docker("cp", f"{stack.containers('router')[0]}:/models/tiny", str(path))
    return solo_runner(path, torch.bfloat16)


@pytest.fixture(scope="session")
def expected(solo: SoloRunner) -> Expected:
    return Expected(solo)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with stack.client(stack.api_key()) as client:
        yield client
