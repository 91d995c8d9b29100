"""The engine on a real decoder of alternating sliding and full attention: prompts that outgrow the window, in chunks,
beside others and from cached prefixes, give the bytes of a solo run.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.request import EngineRequest, RequestId
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.synthesize import synthesize
from common.sampling import SamplingParams
from tests.integration.prefixed_requests import prefixed_requests
from tests.integration.test_engine_real_model import BLOCK_SIZE, Model, check_all_choices

_WINDOW = 32


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose a hundredfold when test processes share the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "gpt_oss"
    synthesize("gpt_oss", "tiny", 1, {}, path)
    return path


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def model(checkpoint: Path, request: pytest.FixtureRequest) -> Model:
    config = parse_config(checkpoint)
    assert config.sliding_windows == (_WINDOW, None, _WINDOW, None)
    return Model(load_model(checkpoint, config, request.param, torch.device("cpu"), progress=False).decoder)


def _requests(model: Model, count: int) -> list[EngineRequest]:
    vocab_size = model.decoder.config.vocab_size
    return prefixed_requests(vocab_size, count, block_size=BLOCK_SIZE, max_blocks=6)


@pytest.mark.parametrize("chunk", [16, 24, 48])
def test_windows_chunks_and_cached_prefixes_equal_solo_runs(model: Model, chunk: int) -> None:
    rig, oracle = model.rig(num_blocks=64, chunk=chunk), model.solo()
    requests = _requests(model, 24)
    transcripts = []
    for request in requests:  # a few steps apart, so that early prefixes are cached when the later requests come
        transcripts.append(rig.submit(request))
        rig.step()
        rig.step()
    rig.run()
    assert rig.core.stats.step_failures == 0
    assert rig.core.stats.prefix_cache_hits > 10 * _WINDOW
    for got in transcripts:
        check_all_choices(got, oracle)
    rig.assert_baseline()


def test_a_prompt_resumes_anywhere_relative_to_its_window(model: Model) -> None:
    """Each prompt is served again, whole and shortened, from blocks that start before, in and after its window."""
    rig, oracle = model.rig(num_blocks=64, chunk=16), model.solo()
    tokens = np.random.default_rng(2).integers(3, 500, 7 * BLOCK_SIZE).tolist()
    for length in (len(tokens), *range(BLOCK_SIZE, len(tokens), 9)):
        request = EngineRequest(RequestId(f"p{length}"), tokens[:length], SamplingParams(8, temperature=0), 0)
        got = rig.submit(request)
        rig.run()
        check_all_choices(got, oracle)
    assert rig.core.stats.prefix_cache_hits > 0
    rig.assert_baseline()
