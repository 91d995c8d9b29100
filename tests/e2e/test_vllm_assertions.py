"""What vLLM's own tests assert about routed experts, on a model of the same shape: a 2-layer mixtral, top 2 of 8."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest

from common.model.synthesize import synthesize
from tests.e2e.cluster import Cluster, JsonObject, decode_rows, running_cluster
from tests.parity.reference import differing_rows, run_reference

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("mixtral")]

PROMPT = [1, 2, 3]
NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 8, 2


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "mixtral"
    sizes = {"num_hidden_layers": NUM_LAYERS, "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
    synthesize("mixtral", "tiny", 11, sizes, path)
    return path


@pytest.fixture(scope="module")
def cluster(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--dtype", "float32", "--num-kv-blocks", "64", "--threads", "1", "--debug-poison-kv")
    with running_cluster(mixtral, tmp_path_factory.mktemp("mixtral"), *flags) as running:
        yield running


@pytest.fixture
async def session(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.url, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def post(session: aiohttp.ClientSession, path: str, body: JsonObject) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, await response.json()


def generate_body(**sampling: Any) -> JsonObject:
    return {"token_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_tokens": 10} | sampling}


def assert_legal(rows_TLK: npt.NDArray[np.integer]) -> None:
    assert rows_TLK.ndim == 3
    assert rows_TLK.shape[1:] == (NUM_LAYERS, TOP_K)
    assert rows_TLK.min() >= 0
    assert rows_TLK.max() < NUM_EXPERTS
    assert (rows_TLK[..., 0] != rows_TLK[..., 1]).all()


async def test_generate(session: aiohttp.ClientSession, mixtral: Path) -> None:
    status, answer = await post(session, "/inference/v1/generate", generate_body())
    assert status == 200, answer
    (choice,) = answer["choices"]
    rows_TLK = decode_rows(choice["routed_experts"])
    assert_legal(rows_TLK)
    assert len(rows_TLK) == len(PROMPT) + len(choice["token_ids"]) - 1
    conversation = PROMPT + choice["token_ids"]
    assert differing_rows(rows_TLK, run_reference(mixtral, conversation[:-1])) == []


@pytest.mark.parametrize("prompt", [PROMPT, "Hello, world"], ids=["ids", "text"])
async def test_completions(session: aiohttp.ClientSession, prompt: list[int] | str) -> None:
    body = {"prompt": prompt, "max_tokens": 10, "temperature": 0.0, "return_token_ids": True}
    status, answer = await post(session, "/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    rows_TLK = decode_rows(choice["routed_experts"])
    assert_legal(rows_TLK)
    assert len(rows_TLK) == answer["usage"]["prompt_tokens"] + len(choice["token_ids"]) - 1
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]


async def test_both_endpoints_agree(session: aiohttp.ClientSession) -> None:
    _, generated = await post(session, "/inference/v1/generate", generate_body())
    body = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0.0, "return_token_ids": True}
    _, completed = await post(session, "/v1/completions", body)
    for name in ("token_ids", "routed_experts", "finish_reason"):
        assert completed["choices"][0][name] == generated["choices"][0][name]


async def test_offsets(session: aiohttp.ClientSession) -> None:
    _, everything = await post(session, "/inference/v1/generate", generate_body())
    whole = decode_rows(everything["choices"][0]["routed_experts"])
    for start in (0, len(PROMPT) - 1, len(PROMPT)):
        completion = {"prompt": PROMPT, "max_tokens": 10, "temperature": 0.0, "routed_experts_prompt_start": start}
        for path, body in (
            ("/inference/v1/generate", generate_body(routed_experts_prompt_start=start)),
            ("/v1/completions", completion),
        ):
            status, answer = await post(session, path, body)
            assert status == 200, answer
            np.testing.assert_array_equal(decode_rows(answer["choices"][0]["routed_experts"]), whole[start:])


@pytest.mark.parametrize("start", [-1, len(PROMPT) + 1, 2**127])
async def test_wrong_offsets(session: aiohttp.ClientSession, start: int) -> None:
    for path, body in (
        ("/inference/v1/generate", generate_body(routed_experts_prompt_start=start)),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10, "routed_experts_prompt_start": start}),
    ):
        status, answer = await post(session, path, body)
        assert (status, answer["error"]["param"]) == (400, "routed_experts_prompt_start")
    assert (await post(session, "/inference/v1/generate", generate_body()))[0] == 200
