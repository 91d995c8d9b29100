"""Real processes without a prefill worker: with the flag requests succeed, without it they are refused as ever."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.engine.solo import SoloRunner
from tests.e2e.cluster import PATIENT_ROUTER, Client, JsonObject, running_cluster, until
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.services import Service, launched_service
from tests.e2e.test_faults import MODEL_FLAGS, connected, terminate_in_time, wait_ready
from tests.e2e.test_routing_rows import prompt_of

pytestmark = pytest.mark.cluster

FIELDS: JsonObject = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}


@contextmanager
def prefill_worker(model: Path, folder: Path, *flags: str) -> Iterator[Service]:
    folder.mkdir()
    with launched_service("prefill_worker", folder, "--model", str(model), *MODEL_FLAGS, *flags) as launched:
        yield launched.wait_ready()


async def assert_serves(client: Client, solo: SoloRunner, *seeds: int) -> None:
    """Right answers, whole and streamed, each to a prompt that no cache knows."""
    for seed in seeds:
        prompt = prompt_of(40, seed)
        answer = await client.generate(prompt, stream=seed % 2 == 0, **FIELDS)
        assert_equals_solo(answer, solo, prompt, **FIELDS)


async def assert_counts(client: Client, *, fallbacks: int) -> None:
    assert await client.metric("moerelay_aggregated_fallbacks_total") == fallbacks
    assert await client.metric("moerelay_local_prefills_total", "decode") == fallbacks


async def wait_fallback(client: Client, expected: bool) -> None:
    async def reached() -> bool:
        view = await client.json("/cluster")
        return view["router"]["ready"] is True and view["router"]["fallback"] is expected

    await until(reached, 60.0)


async def test_prefill_is_killed_and_comes_back(tiny_model: Path, tmp_path: Path, solo: SoloRunner) -> None:
    """Without the flag these are 503: `test_dead_prefill_ends_requests_and_decode_exits`."""
    with (
        launched_service("decode_worker", tmp_path, "--model", str(tiny_model), *MODEL_FLAGS) as launched,
        prefill_worker(tiny_model, tmp_path / "first") as prefill,
    ):
        decode = launched.wait_ready()
        flags = ("--prefill", prefill.address, "--decode", decode.address, "--allow-aggregated-fallback")
        with launched_service("router", tmp_path, *flags, *PATIENT_ROUTER) as launched_router:
            router = launched_router.wait_ready()
            async with connected(router.url) as client:
                await wait_fallback(client, expected=False)
                await assert_serves(client, solo, 0, 1)
                await assert_counts(client, fallbacks=0)
                prefill.process.kill()
                await wait_fallback(client, expected=True)
                await wait_ready(client)
                assert (await client.json("/health"))["fallback"] is True
                await assert_serves(client, solo, 2, 3, 4, 5)
                await assert_counts(client, fallbacks=4)
                port = ("--port", prefill.address.rpartition(":")[2])
                with prefill_worker(tiny_model, tmp_path / "second", *port):
                    await wait_fallback(client, expected=False)
                    await assert_serves(client, solo, 6, 7)
                    await assert_counts(client, fallbacks=4)
                    assert await client.metric("moerelay_prompt_tokens_computed_total", "prefill") == 80
            assert "aggregated_fallback_over" in router.log.read_text()
        terminate_in_time(decode)


async def test_a_cluster_of_one_machine_goes_on_without_its_prefill_worker(
    tiny_model: Path, tmp_path: Path, solo: SoloRunner
) -> None:
    """Prompts of up to 16 tokens never needed it. That `up` ends without the flag is tested with stand-ins."""
    flags = (*MODEL_FLAGS, "--allow-aggregated-fallback", "--local-prefill-max-tokens", "16")
    with running_cluster(tiny_model, tmp_path, *flags) as cluster:
        async with connected(cluster.url) as client:
            short = prompt_of(16)
            assert_equals_solo(await client.generate(short, **FIELDS), solo, short, **FIELDS)
            await assert_serves(client, solo, 0)
            assert await client.metric("moerelay_local_prefills_total", "decode") == 1
            assert await client.metric("moerelay_prompt_tokens_computed_total", "prefill") == 40
            [pid] = [w["pid"] for w in (await client.json("/cluster"))["workers"] if w["role"] == "prefill"]
            os.kill(pid, signal.SIGKILL)
            await wait_fallback(client, expected=True)
            await assert_serves(client, solo, 1, 2)
            assert await client.metric("moerelay_aggregated_fallbacks_total") == 2
            assert await client.metric("moerelay_local_prefills_total", "decode") == 3
    assert "the cluster goes on without it" in cluster.log.read_text()
