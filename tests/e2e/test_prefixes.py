"""Cached prefixes on real workers: which ones are found, whose rows they have, and what is left after a restart."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from common.engine.solo import SoloRunner
from tests.e2e.cluster import PATIENT_ROUTER, Answer, Client, JsonObject, until
from tests.e2e.oracle import assert_equals_solo
from tests.e2e.services import Launched, Service, launched_service
from tests.e2e.test_faults import MODEL_FLAGS, connected
from tests.e2e.test_routing_rows import prompt_of

pytestmark = pytest.mark.cluster

BLOCK_SIZE = 16
FIELDS: JsonObject = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}

#: Pairs of prompts that weak names of prefixes confuse; each is two blocks, so that the first one could be found.
COLLISIONS = {
    "bytes of ids joined": ([1, 2] * 16, [258] * 16 + [1, 2] * 8),
    "the low byte of ids": ([1, 44] * 16, [257, 44] * 16),
    "digits of ids joined": ([1, 23] * 16, [12, 3] * 16),
    "digits across blocks": ([11] * 15 + [1] + [12] * 16, [11] * 15 + [11] + [2] + [12] * 15),
    "order within a block": ([*range(10, 42)], [*range(10, 24), 25, 24, *range(26, 42)]),
    "order of blocks": ([*range(10, 42)], [*range(26, 42), *range(10, 26)]),
    "a block after another one": ([7] * 16 + [*range(10, 26)], [9] * 16 + [*range(10, 26)]),
    "a block twice": ([5] * 32, [5] * 16 + [6] * 16),
    "sums": ([10, 30] * 16, [20, 20] * 16),
    "exclusive ors": ([12, 12] * 16, [77, 77] * 16),
    "zeros before": ([0] * 16 + [8] * 16, [8] * 16 + [0] * 16),
    "the length of zeros": ([0] * 32, [0] * 17 + [1] * 15),
}
#: Python's hashes of -1 and -2 are equal. No id is negative, but a salt may say so.
SALTS = ("-1", "-2", "1", "12", " 1", "1 ", "é", "e\u0301")


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """In full blocks from the beginning on; the last token of `other` is always forwarded."""
    equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return min(equal, len(other) - 1) // BLOCK_SIZE * BLOCK_SIZE


async def ask(client: Client, solo: SoloRunner, prompt: list[int], salt: str | None = None) -> int:
    """`cached_tokens` of an answer that equals the solo run."""
    answer = await client.generate(prompt, cache_salt=salt, **FIELDS)
    assert_equals_solo(answer, solo, prompt, **FIELDS)
    return cached(answer)


def cached(answer: Answer) -> int:
    assert answer.usage is not None
    number: int = answer.usage["prompt_tokens_details"]["cached_tokens"]
    return number


@pytest.mark.xdist_group("disaggregated")
@pytest.mark.parametrize("kind", COLLISIONS)
async def test_what_a_weak_hash_confuses(client: Client, solo: SoloRunner, kind: str) -> None:
    """openvinotoolkit/openvino.genai#3722, vllm-project/vllm#12621: as in a cold cache, each way around."""
    for turn, (one, other) in enumerate(itertools.permutations(COLLISIONS[kind])):
        salt = f"{kind}/{turn}"
        warm = [*one, 3]
        assert await ask(client, solo, warm, salt) == 0
        assert await ask(client, solo, warm, salt) == 32
        assert await ask(client, solo, [*other, 3], salt) == common_tokens(warm, other)


@pytest.mark.xdist_group("disaggregated")
async def test_equal_ids_under_other_salts(client: Client, solo: SoloRunner) -> None:
    prompt = [*range(100, 140)]
    assert [await ask(client, solo, prompt, salt) for salt in (None, *SALTS)] == [0] * (1 + len(SALTS))
    assert [await ask(client, solo, prompt, salt) for salt in (None, *SALTS)] == [32] * (1 + len(SALTS))


@contextmanager
def worker(role: str, model: Path, folder: Path, *flags: str) -> Iterator[Service]:
    folder.mkdir()
    with launched_service(role, folder, "--model", str(model), *MODEL_FLAGS, *flags) as launched:
        yield launched.wait_ready()


def launched_router(folder: Path, prefill: Service, decode: Service) -> AbstractContextManager[Launched]:
    workers = ("--prefill", prefill.address, "--decode", decode.address)
    return launched_service("router", folder, *workers, *PATIENT_ROUTER)


def same_port(service: Service) -> tuple[str, str]:
    return "--port", service.address.rpartition(":")[2]


async def kill(client: Client, service: Service) -> None:
    """SIGKILL; returns when the router knows."""
    service.process.kill()

    async def noticed() -> bool:
        states = {view["address"]: view["state"] for view in (await client.json("/cluster"))["workers"]}
        return states.get(service.address) != "healthy"

    await until(noticed)


async def paired(client: Client) -> None:
    async def reached() -> bool:
        async with client.session.get(f"{client.url}/ready") as response:
            return response.status == 200

    await until(reached, 60.0)


async def hits(client: Client, role: str) -> float:
    return await client.metric("moerelay_prefix_cache_hit_tokens_total", role)


@pytest.mark.parametrize("restarted", ["prefill", "decode"])
async def test_rows_after_a_restart(tiny_model: Path, tmp_path: Path, solo: SoloRunner, restarted: str) -> None:
    """vllm-project/vllm#55584, #56402, #57966: the new worker has nothing, the other one still has its blocks.

    48 tokens, of which 32 were there before: cached on both sides, then only where nothing was restarted.
    """
    stem = prompt_of(32, 5)
    with (
        worker("prefill_worker", tiny_model, tmp_path / "prefill") as prefill,
        worker("decode_worker", tiny_model, tmp_path / "decode") as decode,
        launched_router(tmp_path, prefill, decode) as router,
    ):
        async with connected(router.wait_ready().url) as client:
            await paired(client)
            assert await ask(client, solo, [*stem, 3]) == 0
            assert await ask(client, solo, [*stem, *prompt_of(16, 6)]) == 32
            old = prefill if restarted == "prefill" else decode
            other = "decode" if restarted == "prefill" else "prefill"
            await kill(client, old)
            with worker(f"{restarted}_worker", tiny_model, tmp_path / "again", *same_port(old)):
                await paired(client)
                before = await hits(client, other)
                # D takes from its cache what P had to compute again; and P ships what D has lost.
                for seed in (7, 8):
                    await ask(client, solo, [*stem, *prompt_of(16, seed)])
                assert await hits(client, other) - before == 64
                assert await hits(client, restarted) == 32
