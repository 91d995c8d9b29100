"""The engine on the real decoder: mixed batches, chunked prompts and handoffs give the bytes of a solo run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.limits import EngineLimits
from common.engine.request import EngineRequest, RequestId
from common.engine.solo import SoloRunner
from common.kv.store import KVStore
from common.model.decoder import MoeDecoder
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.runner import ModelRunner, kv_layout
from common.model.synthesize import synthesize
from common.sampling import SamplingParams
from tests.unit.engine.rig import CoreRig, RigPair, Transcript

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint in memory."""

    decoder: MoeDecoder

    def store(self, num_blocks: int) -> KVStore:
        config = self.decoder.config
        layout = kv_layout(config, BLOCK_SIZE, self.decoder.dtype)
        return KVStore(layout, config.routing, num_blocks, torch.device("cpu"), poison=True)

    def rig(self, *, num_blocks: int, chunk: int, swap_space_bytes: int = 2**30) -> CoreRig:
        config, store = self.decoder.config, self.store(num_blocks)
        bounds = EngineLimits(
            chunk,
            max_num_seqs=8,
            max_waiting=100,
            max_model_len=128,
            vocab_size=config.vocab_size,
            swap_space_bytes=swap_space_bytes,
        )
        return CoreRig(ModelRunner(self.decoder, store), store, bounds, config.eos_token_ids)

    def solo(self) -> SoloRunner:
        store = self.store(16)
        return SoloRunner(ModelRunner(self.decoder, store), store, self.decoder.config.eos_token_ids)

    def requests(self, count: int) -> list[EngineRequest]:
        """Prompts of 1 to 70 tokens of 1 to 4 choices, greedy and sampled, with and without logprobs and rows."""
        random = np.random.default_rng(0)
        kinds = [
            SamplingParams(12, temperature=0, logprobs=2),
            SamplingParams(1, seed=3, prompt_logprobs=2),
            SamplingParams(9, seed=4, top_p=0.9, logprobs=0, ignore_eos=True),
            SamplingParams(16, seed=-5, temperature=1.5, min_p=0.02, min_tokens=4, prompt_logprobs=0),
        ]
        return [
            EngineRequest(
                RequestId(f"r{i}"),
                random.integers(3, self.decoder.config.vocab_size, random.integers(1, 71)).tolist(),
                replace(kinds[i % len(kinds)], n=1 + i % 4),
                routing_start=None if i % 7 == 6 else 0,
            )
            for i in range(count)
        ]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold when test processes share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    path = tmp_path_factory.mktemp("checkpoint") / family
    synthesize(family, "tiny", 1, {}, path)
    return path


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(checkpoint: Path, request: pytest.FixtureRequest) -> Model:
    config = parse_config(checkpoint)
    return Model(load_model(checkpoint, config, request.param, torch.device("cpu"), progress=False).decoder)


def check_all_choices(got: Transcript, oracle: SoloRunner) -> None:
    request = got.request
    for choice in got.all:
        expected = oracle.run(request.prompt, request.sampling, request.routing_start, choice=choice.choice)
        choice.assert_equals(expected)


def test_mixed_batches_equal_solo_runs(model: Model) -> None:
    rig, oracle = model.rig(num_blocks=24, chunk=16), model.solo()
    transcripts = [rig.submit(request) for request in model.requests(20)]
    rig.run()
    assert rig.core.stats.step_failures == 0
    for got in transcripts:
        check_all_choices(got, oracle)
    rig.assert_baseline()


def test_handoffs_equal_solo_runs(model: Model) -> None:
    pair, oracle = RigPair(model.rig(num_blocks=40, chunk=16), model.rig(num_blocks=40, chunk=16)), model.solo()
    for request in model.requests(6):
        got = pair.start(request)
        pair.hand_over(request.request_id)
        pair.decode.run()
        check_all_choices(got, oracle)
    assert pair.decode.core.stats.prompt_tokens_computed == 0
    pair.prefill.assert_baseline()
    pair.decode.assert_baseline()


@pytest.mark.parametrize("swap_space_bytes", [0, 2**30])
def test_preempted_sequences_equal_solo_runs(model: Model, swap_space_bytes: int) -> None:
    """8 blocks for sequences of up to 6: copied to host memory and back, or computed again in other chunks."""
    rig, oracle = model.rig(num_blocks=9, chunk=16, swap_space_bytes=swap_space_bytes), model.solo()
    transcripts = [rig.submit(request) for request in model.requests(20)]
    long = [
        EngineRequest(RequestId(f"long{i}"), [3 + i, 4, 5], SamplingParams(60, seed=i, n=2, ignore_eos=True), 0)
        for i in range(2)
    ]
    transcripts += [rig.submit(request) for request in long]
    rig.run()
    stats = rig.core.stats
    assert (stats.step_failures, stats.preemptions > 0) == (0, True)
    assert (stats.preemptions_swapped > 0, stats.preemptions_recomputed > 0) == (
        swap_space_bytes > 0,
        swap_space_bytes == 0,
    )
    for got in transcripts:
        check_all_choices(got, oracle)
    rig.assert_baseline()
