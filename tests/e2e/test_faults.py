"""Dead, stopped and ill-matched workers: every request gets an end, every process ends when told."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from common.engine.solo import SoloRunner
from common.model.synthesize import synthesize
from tests.e2e.cluster import Client, running_cluster, until
from tests.e2e.conftest import TINY
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.services import Service, running_service
from tests.e2e.test_disconnect import assert_baseline, gauges
from tests.e2e.test_routing_rows import prompt_of

pytestmark = pytest.mark.cluster

MODEL_FLAGS = ("--dtype", "float32", "--num-kv-blocks", "160", "--max-num-batched-tokens", "16", "--num-threads", "1")
EXIT_S = 5.0


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield Client(session, url)


@contextmanager
def three_services(
    model: Path, tmp_path: Path, prefill_flags: tuple[str, ...] = (), decode_flags: tuple[str, ...] = ()
) -> Iterator[tuple[Service, Service, Service]]:
    """A prefill worker, a decode worker and a router, each its own child of the test."""
    base = ("--model", str(model), *MODEL_FLAGS)
    with (
        running_service("prefill_worker", tmp_path, *base, *prefill_flags) as prefill,
        running_service("decode_worker", tmp_path, *base, *decode_flags) as decode,
        running_service("router", tmp_path, "--prefill", prefill.address, "--decode", decode.address) as router,
    ):
        yield prefill, decode, router


async def wait_ready(client: Client, status: int = 200) -> None:
    async def reached() -> bool:
        async with client.session.get(f"{client.url}/ready") as response:
            return response.status == status

    await until(reached, 15.0)


async def wait_handoff_begun(client: Client) -> None:
    async def begun() -> bool:
        return await client.metric("moerelay_handoff_bytes_total", "decode") > 0

    await until(begun)


async def test_dead_prefill_ends_requests_and_decode_exits(tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 P under load: typed errors, D's gauges at baseline, and SIGTERM still ends D and router in time.

    libzmq#3915, zeromq/pyzmq#102, vllm-project/vllm#46283, #50754.
    """
    with three_services(tiny_model, tmp_path) as (prefill, decode, router):
        async with connected(router.url) as client:
            await wait_ready(client)
            idle = await gauges(client)
            requests = [
                asyncio.create_task(client.generate(prompt_of(100, i), max_tokens=20, stream=i % 2 == 0))
                for i in range(10)
            ]
            await wait_handoff_begun(client)
            prefill.process.kill()
            async with asyncio.timeout(10):
                answers = await asyncio.gather(*requests)
            for answer in answers:
                assert answer.finish_reason or answer.error, answer
            await wait_ready(client, status=503)
            refused = await client.generate(prompt_of(4), max_tokens=2)
            assert refused.status == 503
            await assert_baseline(client, idle, within_s=8.0)
        for service in (decode, router):
            begun = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(EXIT_S) == 0, service.log.read_text()[-3000:]
            assert time.monotonic() - begun < EXIT_S


async def test_stopped_decode_loses_nothing(tiny_model: Path, tmp_path: Path, solo: SoloRunner) -> None:
    """SIGSTOP D while P pushes, SIGCONT: every answer is right or an explicit error. libzmq#2037, #2161."""
    with three_services(tiny_model, tmp_path) as (_, decode, router):
        async with connected(router.url) as client:
            await wait_ready(client)
            prompts = [prompt_of(100, i) for i in range(40)]
            requests = [asyncio.create_task(client.generate(p, max_tokens=4, ignore_eos=True)) for p in prompts]
            await wait_handoff_begun(client)
            os.kill(decode.process.pid, signal.SIGSTOP)
            await asyncio.sleep(2.0)  # the fault itself: a receiver that is away for two seconds
            os.kill(decode.process.pid, signal.SIGCONT)
            answers = await asyncio.gather(*requests)
            for prompt, answer in zip(prompts, answers, strict=True):
                if answer.error is None:
                    assert_equals_solo(answer, solo, prompt, max_tokens=4, ignore_eos=True)
            assert any(answer.error is None for answer in answers)
            after = await client.generate(prompts[0], max_tokens=4, ignore_eos=True)
            assert_equals_solo(after, solo, prompts[0], max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--max-model-len", "64"), "max_model_len"),
        (("--block-size", "8", "--num-kv-blocks", "320"), "block_size"),
        (("--dtype", "bfloat16"), "dtype"),
        (("--no-enable-return-routed-experts",), "--enable-return-routed-experts"),
    ],
    ids=["context", "block size", "dtype", "routing switch"],
)
async def test_unequal_workers_are_not_paired(
    tiny_model: Path, tmp_path: Path, flags: tuple[str, ...], word: str
) -> None:
    """The router refuses the pair in words and takes no request. vllm-project/vllm#14952, sgl-project/sglang#30233."""
    with three_services(tiny_model, tmp_path, prefill_flags=flags) as (_, _, router):
        async with connected(router.url) as client:

            async def refused() -> bool:
                return word in router.log.read_text()

            await until(refused)
            answer = await client.generate(prompt_of(50), max_tokens=2)
            assert answer.status == 503
            assert not answer.token_ids


async def test_dtype_follows_the_model(tmp_path: Path) -> None:
    """257 experts are uint16 even where every id is small. PrimeIntellect-ai/prime-rl#2487."""
    wide = tmp_path / "wide"
    synthesize("qwen3_moe", "tiny", 1, TINY | {"num_experts": 257}, wide)
    with running_cluster(wide, tmp_path, "--num-kv-blocks", "64", "--dtype", "float32") as cluster:
        async with connected(cluster.url) as client:
            plain = await client.generate(prompt_of(20), max_tokens=5, ignore_eos=True)
            streamed = await client.generate(prompt_of(20), max_tokens=5, ignore_eos=True, stream=True)
            assert {part.dtype.name for part in (*plain.row_parts, *streamed.row_parts)} == {"uint16"}
            assert plain.rows.tobytes() == streamed.rows.tobytes()


@pytest.mark.parametrize(
    ("change", "flags", "word"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, (), "qwen3_moe"),
        ({}, ("--pipeline-parallel-size", "2"), "--pipeline-parallel-size"),
        ({}, ("--decode-context-parallel-size", "2"), "--decode-context-parallel-size"),
    ],
    ids=["dense", "pipeline", "context parallel"],
)
def test_impossible_starts_are_refused_fast(
    tiny_model: Path, tmp_path: Path, change: dict[str, object], flags: tuple[str, ...], word: str
) -> None:
    """Under two seconds, exit code not 0, the reason on stderr. vllm-project/vllm#42593."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(json.loads((tiny_model / "config.json").read_text()) | change))
    command = [sys.executable, "-m", "deploy.cli", "up", "--model", str(model), "--port", "0", *flags]
    begun = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert time.monotonic() - begun < 2.0
    assert result.returncode != 0
    assert result.stdout == ""
    assert word in result.stderr
