"""Dead, stopped and ill-matched workers: every request gets an end, every process ends when told."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from common.engine.solo import SoloRunner
from tests.e2e.cluster import PATIENT_WORKER, Client, JsonObject, running_cluster, until
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.services import Service, launched_service
from tests.e2e.test_disconnect import assert_baseline
from tests.e2e.test_routing_rows import prompt_of

pytestmark = pytest.mark.cluster

MODEL_FLAGS = (
    *("--dtype", "float32", "--num-kv-blocks", "160", "--max-num-batched-tokens", "16", "--threads", "1"),
    *PATIENT_WORKER,
)
#: For whoever has nothing left to finish: less than --drain-timeout-s, and a busy machine has to manage, too.
EXIT_S = 20.0
#: Whoever waits for a dead worker would take longer.
END_S = 30.0


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
        launched_service("prefill_worker", tmp_path, *base, *prefill_flags) as prefill_process,
        launched_service("decode_worker", tmp_path, *base, *decode_flags) as decode_process,
    ):
        prefill, decode = prefill_process.wait_ready(), decode_process.wait_ready()
        with launched_service("router", tmp_path, "--prefill", prefill.address, "--decode", decode.address) as router:
            yield prefill, decode, router.wait_ready()


async def wait_ready(client: Client, status: int = 200) -> None:
    async def reached() -> bool:
        async with client.session.get(f"{client.url}/ready") as response:
            return response.status == status

    await until(reached, 60.0)


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
            requests = [
                asyncio.create_task(client.generate(prompt_of(100, i), max_tokens=20, stream=i % 2 == 0))
                for i in range(10)
            ]
            await wait_handoff_begun(client)
            prefill.process.kill()
            async with asyncio.timeout(END_S):
                answers = await asyncio.gather(*requests)
            for answer in answers:
                assert answer.finish_reason or answer.error, answer
            await wait_ready(client, status=503)
            refused = await client.generate(prompt_of(4), max_tokens=2)
            assert refused.status == 503
            await assert_baseline(client)
        for service in (decode, router):
            terminate_in_time(service)


async def test_everybody_exits_in_time_while_decode_stands_still(tiny_model: Path, tmp_path: Path) -> None:
    """zeromq/pyzmq#537, LMCache#5088: frames for a peer that reads nothing keep neither P nor router from exiting."""
    with three_services(tiny_model, tmp_path, prefill_flags=("--drain-timeout-s", "1")) as (prefill, decode, router):
        async with connected(router.url) as client:
            await wait_ready(client)
            requests = [
                asyncio.create_task(client.generate(prompt_of(100, i), max_tokens=20, stream=i % 2 == 0))
                for i in range(20)
            ]
            await wait_handoff_begun(client)
            os.kill(decode.process.pid, signal.SIGSTOP)
            terminate_in_time(prefill)
            async with asyncio.timeout(END_S):
                answers = await asyncio.gather(*requests)
            assert all(answer.finish_reason or answer.error for answer in answers)
        terminate_in_time(router)
        os.kill(decode.process.pid, signal.SIGCONT)
        terminate_in_time(decode)


def terminate_in_time(service: Service) -> None:
    """SIGTERM ends it with code 0."""
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(EXIT_S) == 0, service.log.read_text()[-3000:]


@pytest.mark.xdist_group("disaggregated")
async def test_stopped_decode_loses_nothing(client: Client, solo: SoloRunner) -> None:
    """SIGSTOP D while P pushes, SIGCONT: every answer is right or an explicit error. libzmq#2037, #2161.

    40 prompts of 7 chunks each are 280 messages; more than the mark of 1000 is
    `test_over_a_thousand_chunks_survive_a_receiver_that_stalls`.
    """
    [pid] = [w["pid"] for w in (await client.json("/cluster"))["workers"] if w["role"] == "decode"]
    prompts = [prompt_of(100, i) for i in range(40)]
    before = await client.metric("moerelay_handoff_bytes_total", "decode")

    async def begun() -> bool:
        return await client.metric("moerelay_handoff_bytes_total", "decode") > before

    requests = [asyncio.create_task(client.generate(p, max_tokens=4, ignore_eos=True)) for p in prompts]
    await until(begun)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2.0)  # the fault itself: a receiver that is away for two seconds
    os.kill(pid, signal.SIGCONT)
    answers = await asyncio.gather(*requests)
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer.error is None:
            assert_equals_solo(answer, solo, prompt, max_tokens=4, ignore_eos=True)
    assert any(answer.error is None for answer in answers)
    after = await client.generate(prompts[0], max_tokens=4, ignore_eos=True)
    assert_equals_solo(after, solo, prompts[0], max_tokens=4, ignore_eos=True)


async def test_workers_that_do_not_fit_are_not_paired(tiny_model: Path, tmp_path: Path) -> None:
    """sgl-project/sglang#30233: a P with a shorter context than D's is refused in words, and no token is ever streamed.

    Other differences: `test_workers_of_another_layout_are_refused`, in one process.
    """
    with three_services(tiny_model, tmp_path, prefill_flags=("--max-model-len", "64")) as (_, _, router):
        async with connected(router.url) as client:

            async def refused() -> bool:
                return "max_model_len" in router.log.read_text()

            await until(refused)
            for stream in (False, True):
                answer = await client.generate(prompt_of(100), max_tokens=2, stream=stream)
                assert (answer.status, answer.token_ids) == (503, [])


async def test_aggregated_mode_gives_the_same_bytes(tiny_model: Path, tmp_path: Path, solo: SoloRunner) -> None:
    """One worker of role both, no handoff: what the disaggregated cluster gives too. llm-d/llm-d-router#1473."""
    flags = ("--mode", "aggregated", "--dtype", "float32", "--num-kv-blocks", "160", "--max-num-batched-tokens", "16")
    with running_cluster(tiny_model, tmp_path, *flags) as cluster:
        async with connected(cluster.url) as client:

            async def one(index: int) -> None:
                prompt, stream = prompt_of(1 + 7 * index % 100, index), index % 2 == 0
                fields: JsonObject = {
                    "max_tokens": 1 + index % 20,
                    "temperature": index % 3 / 2,
                    "seed": index,
                    "logprobs": 1,
                }
                answer = await client.generate(prompt, stream=stream, **fields)
                assert_equals_solo(answer, solo, prompt, **fields)

            await asyncio.gather(*(one(index) for index in range(40)))


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
    """Before any process has loaded torch, which takes seconds; the reason is on stderr. vllm-project/vllm#42593."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(json.loads((tiny_model / "config.json").read_text()) | change))
    command = [sys.executable, "-m", "deploy.cli", "up", "--model", str(model), "--port", "0", *flags]
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}  # every process names what it has imported on stderr
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, env=environment)
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "deploy" in imported
    assert "torch" not in imported
    assert any(word in line for line in lines if not line.startswith("import time:"))
