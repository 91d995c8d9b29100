"""Experts come out as they stand in the file, and no layer is ever in memory twice."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.model.checkpoint import CheckpointFiles
from common.model.families import parse_config
from common.model.feed_forward import MoeFeedForward
from common.model.kernels.reference import TORCH
from common.model.layer_loader import load_layer
from common.model.layers import linear, prepare_weight
from common.model.moe import TorchExperts
from common.model.tensor_source import TensorSource
from tests.unit.model.harness import CPU, make_checkpoint

_HIDDEN, _SIZE = 64, 128  # expert weights large enough to be packed

Tensors = dict[str, torch.Tensor]
Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _fused(tensors: Tensors, expert: int) -> Projections:
    prefix = "model.layers.0.mlp.experts"
    gate_up_HF = tensors[f"{prefix}.gate_up_proj"][expert]
    return gate_up_HF[:, 0::2], gate_up_HF[:, 1::2], tensors[f"{prefix}.down_proj"][expert]


def _unfused(prefix: str, *names: str) -> Callable[[Tensors, int], Projections]:
    def projections(tensors: Tensors, expert: int) -> Projections:
        gate, up, down = (tensors[f"model.layers.0.{prefix}.experts.{expert}.{name}.weight"].T for name in names)
        return gate, up, down

    return projections


#: By family: the key of an expert's width, and an expert's gate, up and down projection, each [inputs, outputs].
_FAMILIES = {
    "gpt_oss": ("intermediate_size", _fused),
    "mixtral": ("intermediate_size", _unfused("block_sparse_moe", "w1", "w3", "w2")),
    "qwen3_moe": ("moe_intermediate_size", _unfused("mlp", "gate_proj", "up_proj", "down_proj")),
}


class _OneExpertAtATime(CheckpointFiles):
    """A checkpoint in which no projection of all experts is ever read at once."""

    def read(self, name: str) -> torch.Tensor:
        assert len(self.shape(name)) < 3, f"{name} was read as a whole"
        return super().read(name)


class _RecordingSource(TensorSource):
    """Keeps the shapes of what was allocated."""

    def __init__(self, files: CheckpointFiles, dtype: torch.dtype) -> None:
        super().__init__(files, dtype, CPU, lambda count: None)
        self.allocated: list[tuple[int, ...]] = []

    def empty(self, *shape: int) -> torch.Tensor:
        self.allocated.append(shape)
        return super().empty(*shape)


def _load(path: Path, dtype: torch.dtype) -> tuple[TorchExperts, list[tuple[int, ...]]]:
    with _OneExpertAtATime(path) as files:
        source = _RecordingSource(files, dtype)
        layer = load_layer(source, parse_config(path), 0, TORCH)
    assert isinstance(layer.feed_forward, MoeFeedForward)
    assert isinstance(layer.feed_forward.experts, TorchExperts)
    return layer.feed_forward.experts, source.allocated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_layer_is_loaded_expert_by_expert(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    key, projections = _FAMILIES[family]
    path = make_checkpoint(tmp_path / "m", family, {"num_hidden_layers": 1, key: _SIZE})
    experts, allocated = _load(path, dtype)

    tensors = load_file(path / "model.safetensors")
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):
        expected = [projection.to(dtype) for projection in projections(tensors, expert)]
        rows = linear(torch.eye(_HIDDEN, dtype=dtype), gate_up)
        assert torch.equal(rows[:, :_SIZE], expected[0])
        assert torch.equal(rows[:, _SIZE:], expected[1])
        assert torch.equal(linear(torch.eye(_SIZE, dtype=dtype), down), expected[2])

    weight = torch.empty(_HIDDEN, _SIZE, dtype=dtype)
    is_copied = prepare_weight(weight) is not weight
    of_all_experts = [shape for shape in allocated if len(shape) == 3]
    # Copies are kept, so their originals are not; originals that are kept are in one piece.
    assert of_all_experts == ([] if is_copied else [(8, 2 * _SIZE, _HIDDEN), (8, _HIDDEN, _SIZE)])
    assert allocated.count((_HIDDEN, _SIZE)) <= 1
