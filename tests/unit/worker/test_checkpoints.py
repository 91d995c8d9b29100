"""Which checkpoints may replace the one that is served."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from common.errors import InvalidRequestError
from common.model.families import parse_config
from common.model.kernels.reference import TORCH
from common.model.quantized.config import Quantization, block_fp8
from common.model.synthesize import synthesize
from common.worker.checkpoints import CheckpointLoader

SMALL = {"num_hidden_layers": 2, "num_experts": 4}


def _make(
    path: Path, seed: int, quantization: Quantization | None = None, overrides: Mapping[str, object] | None = None
) -> Path:
    synthesize("qwen3_moe", "tiny", seed, {**SMALL, **(overrides or {})}, path, quantization=quantization)
    return path


def _loader(served: Path) -> CheckpointLoader:
    return CheckpointLoader(parse_config(served), torch.float32, torch.device("cpu"), 64, TORCH)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_weights_may_be_stored_in_another_form(tmp_path: Path, order: tuple[int, int]) -> None:
    """As a trainer sends bfloat16 to a worker that was started from the published fp8."""
    paths = [_make(tmp_path / "plain", 1), _make(tmp_path / "fp8", 2, block_fp8(16, 16))]
    served, other = (paths[i] for i in order)
    loaded = await _loader(served).load(other)
    assert loaded.decoder.config.quantization == parse_config(other).quantization


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"num_experts": 8}, r"experts\.num_experts is 8, and 4"),
        ({"num_key_value_heads": 4}, r"attention\.num_kv_heads is 4, and 2"),
        ({"norm_topk_prob": False}, r"router\.normalize is False, and True"),
        ({"rope_theta": 5000.0}, r"rope\.theta is 5000\.0, and 10000\.0"),
        ({"vocab_size": 600}, r"vocab_size is 600, and 512"),
    ],
)
async def test_what_computes_something_else_is_refused_by_name(
    tmp_path: Path, override: dict[str, object], words: str
) -> None:
    served, other = _make(tmp_path / "served", 1), _make(tmp_path / "other", 1, overrides=override)
    with pytest.raises(InvalidRequestError, match=words):
        await _loader(served).load(other)
