"""The engine on latent attention: vectors cached, shipped, swapped or computed again give a solo run's bytes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine.request import EngineRequest, RequestId
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.synthesize import synthesize
from common.sampling import SamplingParams
from tests.integration.prefixed_requests import prefixed_requests
from tests.integration.test_engine_real_model import BLOCK_SIZE, Model, check_all_choices
from tests.unit.engine.rig import RigPair


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold when test processes share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    path = tmp_path_factory.mktemp("checkpoint") / family
    synthesize(family, "tiny", 1, {"num_hidden_layers": 2}, path)
    return path


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(checkpoint: Path, request: pytest.FixtureRequest) -> Model:
    config = parse_config(checkpoint)
    model = Model(load_model(checkpoint, config, request.param, torch.device("cpu"), progress=False).decoder)
    assert model.store(2).layout.num_planes == 1
    return model


def _requests(model: Model, count: int) -> list[EngineRequest]:
    vocab_size = model.decoder.config.vocab_size
    return prefixed_requests(vocab_size, count, block_size=BLOCK_SIZE, max_blocks=5)


def test_chunks_neighbours_and_cached_prefixes_equal_solo_runs(model: Model) -> None:
    rig, oracle = model.rig(num_blocks=64, chunk=24), model.solo()
    transcripts = []
    for request in _requests(model, 12):  # a few steps apart, so that early prefixes are cached when later ones come
        transcripts.append(rig.submit(request))
        rig.step()
        rig.step()
    rig.run()
    assert rig.core.stats.step_failures == 0
    assert rig.core.stats.prefix_cache_hits > 0
    for got in transcripts:
        check_all_choices(got, oracle)
    rig.assert_baseline()


@pytest.mark.parametrize("swap_space_bytes", [0, 2**30])
def test_preempted_sequences_equal_solo_runs(model: Model, swap_space_bytes: int) -> None:
    """8 blocks for six sequences of up to 4 each: copied to host memory and back, or computed again."""
    rig, oracle = model.rig(num_blocks=9, chunk=16, swap_space_bytes=swap_space_bytes), model.solo()
    sampling = [SamplingParams(60, seed=seed, n=2, ignore_eos=True) for seed in range(3)]
    requests = [EngineRequest(RequestId(f"r{i}"), [3 + i, 4, 5], sampling[i], routing_start=0) for i in range(3)]
    transcripts = [rig.submit(request) for request in requests]
    rig.run()
    stats = rig.core.stats
    assert (stats.step_failures, stats.preemptions > 0) == (0, True)
    assert (stats.preemptions_swapped > 0) == (swap_space_bytes > 0)
    for got in transcripts:
        check_all_choices(got, oracle)
    rig.assert_baseline()


def test_handoffs_of_what_the_decode_side_lacks_equal_solo_runs(model: Model) -> None:
    """Both sides keep prefixes, in pools of different sizes, so that they have kept different ones."""
    pair, oracle = RigPair(model.rig(num_blocks=40, chunk=16), model.rig(num_blocks=20, chunk=16)), model.solo()
    for request in _requests(model, 10):
        got = pair.start(request)
        pair.hand_over(request.request_id)
        pair.decode.run()
        check_all_choices(got, oracle)
    for side in (pair.prefill, pair.decode):
        assert side.core.stats.prefix_cache_hits > 0
        side.assert_baseline()
