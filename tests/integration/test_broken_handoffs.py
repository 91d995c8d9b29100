"""A part that breaks during a handoff: typed errors, no token of the broken request, and everybody else is served."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from common.model.batch import Chunk
from tests.chaos.test_handoff_races import CREDIT_BYTES, FIELDS, KIT, answer_is_solo, leave, prompt_of, start
from tests.contract.transports import NAMES, Transport, make_transport
from tests.e2e.cluster import until
from tests.fakes.fake_runner import FakeRunner
from tests.integration.kit import Kit, checkpoint_kit
from tests.integration.relay import Relay, WorkerEnd, WorkerPlan, running_relay

DECODE = WorkerPlan(KIT, chunk=8, credit_bytes=CREDIT_BYTES)
PREFILL = WorkerPlan(KIT, chunk=8)

pytestmark = pytest.mark.usefixtures("patient_sockets")

#: A client learns of a broken handoff without a timeout: those of `patient_sockets` and of the plans are a minute.
ERROR_S = 30.0

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(params=NAMES)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    # Not tmp_path: the path of an ipc socket has 107 bytes at most.
    with TemporaryDirectory() as directory:
        yield make_transport(request.param, Path(directory))


def fake_runner(end: WorkerEnd) -> FakeRunner:
    assert isinstance(end.runner, FakeRunner)
    return end.runner


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("start_s", [0, 8, 96])
async def test_prefill_that_fails_in_mid_prompt_streams_no_token(stream: bool, start_s: int) -> None:
    """sgl-project/sglang#30233: P breaks in the first, a middle or the last chunk; D never decodes from partial KV."""
    solo = KIT.solo()

    def breaks(chunks: Sequence[Chunk]) -> bool:
        return any(chunk.start == start_s for chunk in chunks)

    async with running_relay(DECODE, PREFILL) as relay:
        fake_runner(relay.prefiller).fails_on = breaks
        answer = await relay.client.generate(prompt_of(100, 1), stream=stream, **FIELDS)
        assert answer.error is not None
        assert (answer.token_ids, answer.finish_reason) == ([], None)
        # P's own words or, if they come first, D's, whom P told that it gives up.
        assert answer.error["type"] in ("InternalServerError", "HandoffError")
        assert "engine step failed" in answer.error["message"]
        fake_runner(relay.prefiller).fails_on = lambda chunks: False
        await relay.assert_baseline()
        await answer_is_solo(relay, solo, prompt_of(100, 1))


async def three_are_under_way(relay: Relay) -> bool:
    assert relay.prefiller.handoffs is not None
    return relay.prefiller.handoffs.num_active == 3


async def test_a_connection_that_is_lost_once(transport: Transport) -> None:
    """vllm-project/vllm#50754, sgl-project/sglang#36108: the data socket closes under three of five requests.

    Those in transfer end in an error at once; one that decodes and the ones that come later are served.
    """
    solo = KIT.solo()
    async with running_relay(DECODE, PREFILL, transport) as relay:
        fake_runner(relay.decode).gate.clear()  # the first request has been handed over, and its decode step waits
        decoding = asyncio.create_task(answer_is_solo(relay, solo, prompt_of(20, 0)))
        await asyncio.to_thread(fake_runner(relay.decode).entered.wait, 10)
        fake_runner(relay.decode).gate.set()
        await decoding
        relay.valve.allow(4)
        broken = [
            asyncio.create_task(relay.client.generate(prompt_of(100, i), stream=i == 1, **FIELDS)) for i in range(3)
        ]
        await relay.valve.wait_exhausted()
        await until(lambda: three_are_under_way(relay))
        relay.valve.cut()
        async with asyncio.timeout(ERROR_S):
            answers = await asyncio.gather(*broken)
        for answer in answers:
            assert answer.error is not None
            assert answer.token_ids == []
            assert answer.error["type"] == "HandoffError"
        relay.valve.open()
        await asyncio.gather(*(answer_is_solo(relay, solo, prompt_of(100, i)) for i in range(5)))
        await relay.assert_baseline()


async def test_no_prompt_is_computed_for_a_decode_worker_that_cannot_be_reached() -> None:
    """D does not answer the handshake; until P gives up, nothing is computed and no block held in vain."""
    solo = KIT.solo()
    async with running_relay(DECODE, replace(PREFILL, timeout_s=2.0)) as relay:
        relay.receiving.clear()
        answers = await asyncio.gather(*(relay.client.generate(prompt_of(100, i), **FIELDS) for i in range(3)))
        for answer in answers:
            assert answer.error is not None
            assert "handshake" in answer.error["message"]
        assert fake_runner(relay.prefiller).batches == []
        relay.receiving.set()
        await answer_is_solo(relay, solo, prompt_of(100, 1))
        await relay.assert_baseline()


async def test_a_client_that_leaves_after_prefill_was_lost(transport: Transport) -> None:
    """vllm-project/vllm#46283, #46289: the transfer has begun, P's connection is lost, the client leaves: D frees all.

    That a late closing message changes nothing is `test_a_late_transfer_is_refused_and_writes_nothing`.
    """
    solo = KIT.solo()
    async with running_relay(DECODE, PREFILL, transport) as relay:
        for round_ in range(5):
            relay.valve.allow(3)
            left = start(relay.client, prompt_of(100, round_), stream=round_ % 2 == 0)
            await relay.valve.wait_exhausted()
            relay.valve.cut()
            await leave(left)
            await relay.assert_baseline()
            relay.valve.open()
            await answer_is_solo(relay, solo, prompt_of(60, round_))
        await relay.assert_baseline()


def other_kits(make_checkpoint: MakeCheckpoint) -> dict[str, WorkerPlan]:
    """A real worker per thing that may differ, named by the field of the refusal."""
    path = make_checkpoint()

    def of(kit: Kit) -> WorkerPlan:
        return WorkerPlan(kit)

    return {
        "block_size": of(checkpoint_kit(path, block_size=8)),
        "max_model_len": of(checkpoint_kit(path, max_model_len=64)),
        "dtype": of(checkpoint_kit(path, torch.bfloat16)),
        "fingerprint": of(checkpoint_kit(make_checkpoint(seed=8))),
        "num_layers": of(checkpoint_kit(make_checkpoint(num_hidden_layers=3))),
        "top_k": of(checkpoint_kit(make_checkpoint(num_experts_per_tok=3))),
        "num_experts": of(checkpoint_kit(make_checkpoint(num_experts=16))),
        "head_dim": of(checkpoint_kit(make_checkpoint(head_dim=32))),
        "routing": WorkerPlan(checkpoint_kit(path), routing=False),
    }


async def test_workers_of_another_layout_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    """vllm-project/vllm#14952, sgl-project/sglang#15674: in words at pairing; no request is accepted and then hangs.

    Parallel layouts do not exist; the nearest things are the layouts, models and switches below.
    """
    decode = WorkerPlan(checkpoint_kit(make_checkpoint()))
    for field, prefill in other_kits(make_checkpoint).items():
        async with running_relay(decode, prefill) as relay:
            view = await relay.client.json("/cluster")
            refusals = {worker["role"]: worker["refused"] for worker in view["workers"]}
            assert refusals["decode"] is None
            assert field in refusals["prefill"]
            async with asyncio.timeout(ERROR_S):
                answer = await relay.client.generate([5, 6, 7], max_tokens=4, stream=True)
            assert (answer.status, answer.token_ids) == (503, [])
            assert answer.error is not None
            assert field in answer.error["message"]
