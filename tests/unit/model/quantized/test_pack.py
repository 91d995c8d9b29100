"""What is quantised in a checkpoint that is written, and that it reads back as plain names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ConfigError
from common.model.quantized.config import MXFP4, Quantization, block_fp8
from common.model.quantized.files import open_checkpoint
from common.model.quantized.pack import pack_tensor

_LAYER = "model.layers.0"


def _pack(shapes: dict[str, tuple[int, ...]], quantization: Quantization | None) -> dict[str, torch.Tensor]:
    packed: dict[str, torch.Tensor] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        packed |= pack_tensor(name, tensor, quantization)
    return packed


# As in the index of deepseek-ai/DeepSeek-V3: which tensors come with a scale and which do not.
_QUANTISED = [
    f"{_LAYER}.self_attn.q_a_proj.weight",
    f"{_LAYER}.self_attn.kv_a_proj_with_mqa.weight",
    f"{_LAYER}.self_attn.o_proj.weight",
    f"{_LAYER}.mlp.experts.7.gate_proj.weight",
    f"{_LAYER}.mlp.shared_experts.down_proj.weight",
]
_PLAIN_MATRICES = ["model.embed_tokens.weight", "lm_head.weight", f"{_LAYER}.mlp.gate.weight"]
_PLAIN_VECTORS = [
    f"{_LAYER}.input_layernorm.weight",
    f"{_LAYER}.self_attn.q_a_layernorm.weight",
    f"{_LAYER}.mlp.gate.e_score_correction_bias",
]


def test_fp8_takes_the_matrices_that_deepseek_quantises() -> None:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_QUANTISED + _PLAIN_MATRICES, (5, 7))
    shapes |= dict.fromkeys(_PLAIN_VECTORS, (5,))
    packed = _pack(shapes, block_fp8(4, 4))
    scales = [f"{name}_scale_inv" for name in _QUANTISED]
    assert packed.keys() == {*shapes, *scales}
    assert {name for name, tensor in packed.items() if tensor.dtype == torch.float8_e4m3fn} == set(_QUANTISED)
    assert {packed[name].shape for name in scales} == {(2, 2)}


def test_mxfp4_takes_the_experts_of_gpt_oss() -> None:
    experts = f"{_LAYER}.mlp.experts"
    shapes = {
        f"{experts}.gate_up_proj": (4, 64, 6),
        f"{experts}.gate_up_proj_bias": (4, 6),
        f"{experts}.down_proj": (4, 32, 64),
        f"{experts}.down_proj_bias": (4, 64),
        f"{_LAYER}.mlp.router.weight": (4, 64),
        f"{_LAYER}.self_attn.q_proj.weight": (64, 64),
    }
    packed = _pack(shapes, MXFP4)
    # [E, 2F, H/32, 16] and [E, H, F/32, 16], as published.
    assert packed.pop(f"{experts}.gate_up_proj_blocks").shape == (4, 6, 2, 16)
    assert packed.pop(f"{experts}.gate_up_proj_scales").shape == (4, 6, 2)
    assert packed.pop(f"{experts}.down_proj_blocks").shape == (4, 64, 1, 16)
    assert packed.pop(f"{experts}.down_proj_scales").shape == (4, 64, 1)
    assert packed.keys() == {name for name in shapes if not name.endswith(("gate_up_proj", "down_proj"))}


@pytest.mark.parametrize(
    ("quantization", "name", "shape"),
    [
        (block_fp8(4, 4), _QUANTISED[0], (5, 7)),
        (Quantization("fp8", None), _QUANTISED[0], (5, 7)),
        (MXFP4, f"{_LAYER}.mlp.experts.down_proj", (2, 32, 3)),
        (None, _QUANTISED[0], (5, 7)),
    ],
)
def test_what_is_packed_reads_back_in_name_shape_and_value(
    tmp_path: Path, quantization: Quantization | None, name: str, shape: tuple[int, ...]
) -> None:
    # Small powers of two and zeros, which both formats hold exactly beside a largest value of 4.
    tensor = torch.tensor([4.0, 0.5, -1.0, 0.0, 2.0])[torch.randint(0, 5, shape)]
    tensor[..., 0, :] = 4.0
    tensor[..., :, 0] = 4.0
    save_file(pack_tensor(name, tensor, quantization), tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, quantization) as files:
        files.check({name: shape}, optional=())
        torch.testing.assert_close(files.read(name).float(), tensor, rtol=1e-6, atol=0)


def test_a_size_that_does_not_go_with_the_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        pack_tensor(f"{_LAYER}.mlp.experts.down_proj", torch.zeros(2, 40, 3), MXFP4)
