"""The self-check of a decode worker with a real engine: it finds what was altered, and nothing else."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.kv.store import KVStore, slots_of
from common.model.batch import Chunk, Runner, StepOutput
from common.model.decoder import MoeDecoder
from common.model.runner import ModelRunner
from common.worker.core import WorkerCore
from decode_worker.self_check.checker import SelfCheck
from decode_worker.self_check.reproducer import ReproducerFiles, read_reproducer
from decode_worker.self_check.tally import Skip
from decode_worker.self_check.told import Kind
from deploy.replay import replay
from tests.e2e.cluster import request_body, until
from tests.integration.held_runner import HeldRunner, held
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import Relay, WorkerPlan, running_relay
from tests.integration.test_control import done, hold, in_mid_step

MakeCheckpoint = Callable[..., Path]

PROMPT = list(range(10, 50))


class AlteringRunner(ModelRunner):
    """Spoils what it has computed at one position: the planted fault. Nothing but a test can make one."""

    def __init__(self, decoder: MoeDecoder, store: KVStore) -> None:
        super().__init__(decoder, store)
        self._own_store = store
        #: Position whose experts of the first layer are written in another order.
        self.row: int | None = None
        #: Position after which all logits are a little smaller, which alters logprobs and no token.
        self.logits: int | None = None

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput:
        output = super().execute(chunks)
        [chunk] = chunks
        if self.row is not None and chunk.start <= self.row < chunk.end:
            [slot] = slots_of(chunk.blocks, self.row, self.row + 1, self._own_store.layout.block_size)
            self._own_store.rows_SLK[slot, 0] = self._own_store.rows_SLK[slot, 0, ::-1].copy()
        if self.logits is not None and chunk.wants_logits and chunk.end == self.logits + 1:
            return replace(output, logits_NV=output.logits_NV * 0.99)
        return output


def altering(kit: Kit) -> Kit:
    """The kit with runners that can be told to alter something."""

    def make_runner(store: KVStore) -> Runner:
        made = kit.make_runner(store)
        assert isinstance(made, ModelRunner)
        return AlteringRunner(made.decoder, store)

    return replace(kit, make_runner=make_runner)


@dataclass
class Checked:
    """A cluster whose decode worker checks requests."""

    relay: Relay
    check: SelfCheck
    directory: Path

    async def checked(self, number: int) -> None:
        """Waits until so many have been."""
        await self._until(lambda: self.check.tally.checked == number)

    async def skipped(self, cause: Skip) -> None:
        """Waits until one was, for that cause."""
        await self._until(lambda: self.check.tally.skipped[cause] == 1)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async def is_so() -> bool:
            return condition()

        await until(is_so)

    def files(self) -> list[Path]:
        self.check.close()  # what is being written is there then
        return sorted(self.directory.iterdir())


@asynccontextmanager
async def checked_relay(
    kit: Kit, directory: Path, mode: str = "disaggregated", *, max_tokens: int = 128, rate: float = 1.0, **router: Any
) -> AsyncIterator[Checked]:
    made: list[SelfCheck] = []

    def make(core: WorkerCore) -> SelfCheck:
        files = ReproducerFiles(directory, 2)
        made.append(SelfCheck(core, rate, max_tokens=max_tokens, files=files, rng=random.Random(0)))
        return made[0]

    worker = WorkerPlan(kit)
    prefill = worker if mode == "disaggregated" else None
    async with running_relay(replace(worker, self_check=make), prefill, **router) as relay:
        yield Checked(relay, made[0], directory)
        await relay.assert_baseline()


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_nothing_is_found_where_nothing_is_wrong(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, mode: str, dtype: torch.dtype
) -> None:
    path = make_checkpoint(vocab_size=400)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": -5, "logprobs": 0, "n": 3},
        {"seed": 1, "logit_bias": {"7": 50.0}, "presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"seed": 2, "top_k": 5, "top_p": 0.8, "return_sampling_mask": True, "routed_experts_prompt_start": 20},
        {"seed": 3, "structured_outputs": {"regex": "[a-e]{3,9}"}, "max_tokens": 20},
        {"prompt_logprobs": 2, "routed_experts_prompt_start": len(PROMPT)},
        {"seed": 4, "max_tokens": 1, "logprobs": 1, "routed_experts_prompt_start": len(PROMPT)},
        {"seed": 6, "return_routed_experts": False, "allowed_token_ids": [5, 6, 7, 8], "stop_token_ids": [6]},
    ]
    async with checked_relay(checkpoint_kit(path, dtype), tmp_path, mode, model=str(path)) as cluster:

        async def ask(sampling: dict[str, Any]) -> int:
            body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12, **sampling}}
            async with cluster.relay.client.session.post(
                f"{cluster.relay.client.url}/inference/v1/generate", json=body
            ) as response:
                await response.read()
                return response.status

        assert await asyncio.gather(*map(ask, kinds)) == [200] * len(kinds)
        await cluster.checked(len(kinds))
        # Again, now that the prompt is cached: the solo run computes all of it.
        assert await ask(kinds[0]) == 200
        await cluster.checked(len(kinds) + 1)
        assert not any(cluster.check.tally.skipped.values())
        assert not any(cluster.check.tally.different.values())
        assert await cluster.relay.client.metric("moerelay_self_check_requests_total") == len(kinds) + 1
        assert await cluster.relay.client.metric("moerelay_self_check_differences_total") == 0
        assert cluster.files() == []


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
async def test_one_altered_row_is_found_told_and_kept(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, mode: str
) -> None:
    path = make_checkpoint()
    async with checked_relay(altering(checkpoint_kit(path)), tmp_path / "kept", mode) as cluster:
        runner = cluster.relay.decode.runner
        assert isinstance(runner, AlteringRunner)
        runner.row = len(PROMPT) + 3
        with capture_logs() as logs:
            answer = await cluster.relay.client.generate(PROMPT, max_tokens=10, logprobs=1, request_id="altered")
            await cluster.checked(1)
            [file] = cluster.files()
        assert cluster.check.tally.different[Kind.ROUTED_EXPERTS] == 1
        assert sum(cluster.check.tally.different.values()) == 1
        exposed = await cluster.relay.client.metric("moerelay_self_check_differences_total")
        assert exposed == 1
    [line] = [entry for entry in logs if entry["event"] == "self_check_difference"]
    assert (line["log_level"], line["position"]) == ("error", len(PROMPT) + 3)
    # The client's id comes first, then what tells the prompts of one request apart.
    assert line["request_id"].startswith("altered-0-")
    assert line["differences"] == {"routed_experts": len(PROMPT) + 3}
    assert line["file"] == str(file)
    # What was said belongs into the file, which only its owner reads.
    assert file.stat().st_mode & 0o777 == 0o600
    kept = read_reproducer(file)
    assert (kept.request_id, kept.prompt, kept.differences) == (line["request_id"], tuple(PROMPT), line["differences"])
    served, solo = kept.served.unpack(0), kept.solo
    assert solo is not None
    assert served.rows_TLK is not None
    assert served.rows_TLK.tobytes() == answer.rows.tobytes()
    assert [token.token_id for token in served.tokens] == answer.token_ids
    printed, is_equal = replay(file, str(path))
    assert not is_equal
    assert printed[0] == f"request {line['request_id']}, choice 0: 40 prompt tokens, 10 generated"
    assert f"what was served: routed_experts differ at position {len(PROMPT) + 3}" in printed
    assert "the worker's solo run: equal" in printed


async def test_a_fault_of_the_prefill_worker_is_found_too(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    async with checked_relay(altering(checkpoint_kit(make_checkpoint())), tmp_path) as cluster:
        runner = cluster.relay.prefiller.runner
        assert isinstance(runner, AlteringRunner)
        runner.row, runner.logits = 5, len(PROMPT) - 1
        await cluster.relay.client.generate(PROMPT, max_tokens=4, logprobs=1)
        await cluster.checked(1)
        [file] = cluster.files()
        kept = read_reproducer(file)
        assert kept.differences == {"routed_experts": 5, "logprobs": len(PROMPT)}
        # The next request finds the altered row in the prefix caches: so does its check.
        runner.row = runner.logits = None
        again = await cluster.relay.client.generate([*PROMPT, 60], max_tokens=4)
        assert again.status == 200
        await cluster.checked(2)
        assert cluster.check.tally.different == dict.fromkeys(Kind, 0) | {Kind.ROUTED_EXPERTS: 2, Kind.LOGPROBS: 1}


async def test_requests_that_ended_early_or_are_too_long_are_left_out(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    async with checked_relay(held(checkpoint_kit(make_checkpoint())), tmp_path, "aggregated", max_tokens=60) as cluster:
        client, runner = cluster.relay.client, cluster.relay.decode.runner
        assert isinstance(runner, HeldRunner)
        await client.generate(PROMPT, max_tokens=21, ignore_eos=True)
        await cluster.skipped(Skip.TOO_LONG)
        runner.hold_after(runner.num_steps + 5)
        asked = asyncio.create_task(client.generate(PROMPT, max_tokens=15, ignore_eos=True, request_id="a"))
        await asyncio.to_thread(runner.wait_held)
        async with client.session.post(
            f"{client.url}/inference/v1/abort_requests", json={"request_ids": ["a"]}
        ) as response:
            assert response.status == 200
        runner.hold_after(None)
        assert (await asked).finish_reason == "abort"
        await cluster.skipped(Skip.ABORTED)
        runner.hold_after(runner.num_steps + 5)
        body = request_body(PROMPT, stream=True, max_tokens=15, ignore_eos=True)
        async with client.session.post(f"{client.url}/inference/v1/generate", json=body) as response:
            await response.content.readany()
            response.close()
        await cluster.skipped(Skip.UNFINISHED)
        runner.hold_after(None)
        await client.generate(PROMPT, max_tokens=20, ignore_eos=True)
        await cluster.checked(1)
        assert not any(cluster.check.tally.different.values())


async def test_other_weights_make_a_check_pointless(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, admin: dict[str, Any]
) -> None:
    kit, other = held(checkpoint_kit(make_checkpoint())), make_checkpoint(seed=8)
    async with checked_relay(kit, tmp_path, "aggregated", **admin) as cluster:
        relay, client = cluster.relay, cluster.relay.client
        # One request straddles an update.
        asked = asyncio.create_task(client.generate(PROMPT, max_tokens=60, ignore_eos=True))
        await hold(relay.decode, 4)
        update = asyncio.create_task(done(relay, "/update_weights", {"path": str(other)}))
        await in_mid_step(relay, relay.decode, update)
        assert (await asked).status == 200
        await cluster.skipped(Skip.WEIGHTS)
        # With the new weights alone a request is checked, and by them.
        await client.generate(PROMPT, max_tokens=8, ignore_eos=True)
        await cluster.checked(1)
        assert not any(cluster.check.tally.different.values())


async def test_no_more_are_recorded_than_may_wait(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_worker.self_check.checker.MAX_RECORDED", 2)
    async with checked_relay(held(checkpoint_kit(make_checkpoint())), tmp_path, "aggregated") as cluster:
        runner = cluster.relay.decode.runner
        assert isinstance(runner, HeldRunner)
        runner.hold_after(0)
        asked = [asyncio.create_task(cluster.relay.client.generate(PROMPT, max_tokens=3)) for _ in range(3)]
        await cluster.skipped(Skip.BUSY)
        runner.hold_after(None)
        await asyncio.gather(*asked)
        await cluster.checked(2)
        assert cluster.check.num_waiting == 0


async def test_the_oldest_files_make_room(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    async with checked_relay(altering(checkpoint_kit(make_checkpoint())), tmp_path, "aggregated") as cluster:
        runner = cluster.relay.decode.runner
        assert isinstance(runner, AlteringRunner)
        runner.row = 3
        for number in range(4):
            await cluster.relay.client.generate([number + 5, *PROMPT], max_tokens=2, request_id=f"r{number}")
            await cluster.checked(number + 1)
        kept = [json.loads(path.read_text())["request_id"] for path in cluster.files()]
        assert [name.partition("-")[0] for name in kept] == ["r2", "r3"]


async def test_a_rate_of_some_draws_some(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    async with checked_relay(checkpoint_kit(make_checkpoint()), tmp_path, "aggregated", rate=0.3) as cluster:
        for _ in range(40):
            await cluster.relay.client.generate(PROMPT[:5], max_tokens=1)
        assert cluster.check.num_waiting + cluster.check.tally.checked in range(4, 25)
