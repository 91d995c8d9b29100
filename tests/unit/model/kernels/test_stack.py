"""All layers in one call give the bits that they give one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.model import native
from common.model.batch import Chunk
from common.model.plan import plan_forward
from common.routing.capture import RoutingCapture
from tests.unit.model.harness import CPU, Harness, chunk, load_decoder, make_checkpoint

#: Norm per head; a window; sinks, biases and the clamped activation; a bound of queries, keys and values.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "head-norm": ("qwen3_moe", {}),
    "window": ("mixtral", {"sliding_window": 20}),
    "sinks": ("gpt_oss", {}),
    "bound": ("olmoe", {"clip_qkv": 0.5}),
}


@pytest.fixture(params=native.available())
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def _outcome(harness: Harness, chunks: list[Chunk], *, stacked: bool) -> list[torch.Tensor]:
    """Hidden states, rows and the whole cache after one pass."""
    decoder, store = harness.decoder, harness.store
    if not stacked:
        decoder._stack = None
    plan = plan_forward(chunks, decoder.config, store, decoder.kernels)
    capture = RoutingCapture(decoder.config.routing, len(plan.token_ids_T), CPU)
    with torch.inference_mode():
        hidden_TH = decoder.forward(plan, store.kv_LCSGD, capture)
    return [hidden_TH, torch.from_numpy(capture.take().astype(int)), store.kv_LCSGD.nan_to_num(0).clone()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", _MODELS)
def test_a_stack_computes_what_its_layers_compute(tmp_path: Path, model: str, dtype: torch.dtype, kernels: str) -> None:
    family, overrides = _MODELS[model]
    path = make_checkpoint(tmp_path / "m", family, overrides)
    outcomes = []
    for stacked in (True, False):
        harness = Harness(load_decoder(path, dtype, kernels))
        assert harness.decoder._stack is not None, "this family is stacked"
        tokens = [(7 * i) % 500 for i in range(200)]
        long, short = harness.blocks_for(150), harness.blocks_for(60)
        before = [chunk(tokens[:130], 0, long), chunk(tokens[50:90], 0, short)]
        after = [chunk(tokens[130:131], 130, long), chunk(tokens[90:100], 40, short)]
        outcomes.append([*_outcome(harness, before, stacked=stacked), *_outcome(harness, after, stacked=stacked)])
    for together, apart in zip(*outcomes, strict=True):
        assert torch.equal(together, apart)


def test_layers_that_the_call_does_not_know_stay_apart(tmp_path: Path, kernels: str) -> None:
    """Latent attention, dense layers and shared experts."""
    for family in ("deepseek_v3", "glm4_moe", "qwen2_moe"):
        path = make_checkpoint(tmp_path / family, family, {})
        assert load_decoder(path, kernels=kernels)._stack is None
