"""gpt-oss: its config.json in every spelling, its fused experts, and its MXFP4 checkpoints from end to end."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from common.model.config import ExpertsConfig, GroupedAttention, ModelConfig, RopeConfig, RouterConfig
from common.model.families import config_from_json, parse_config
from common.model.loader import load_model
from common.model.quantized.config import MXFP4
from common.model.quantized.files import open_checkpoint
from common.model.quantized.mxfp4 import dequantize_mxfp4
from common.model.rope_scaling import YarnScaling
from common.model.synthesize import synthesize
from common.model.tensor_source import TensorSource
from common.model.tensors import fused_expert_tensors
from tests.unit.model.harness import CPU, load_decoder, make_checkpoint, solo_run

_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}

#: The shape of openai/gpt-oss-20b's config.json, in the spelling of transformers 4.
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": _YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def _parse(*, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    values = {key: value for key, value in _GPT_OSS.items() if key not in without} | changes
    return config_from_json(values, {}, source="config.json")


def test_the_published_config() -> None:
    config = _parse()
    assert config.attention == GroupedAttention(
        64, 8, 64, rotary_dim=64, qkv_bias=True, out_bias=True, qk_norm=None, sinks=True
    )
    assert config.experts == ExpertsConfig(
        32, 2880, bias=True, activation="clamped_swiglu", alpha=1.702, limit=7.0, shared_size=None
    )
    assert config.router == RouterConfig(scoring="chosen_softmax", bias=True)
    assert (config.num_layers, config.top_k, config.moe_layers) == (24, 4, frozenset(range(24)))
    assert config.sliding_windows == (128, None) * 12
    temperature = 0.1 * math.log(32) + 1  # of YaRN
    assert config.rope == RopeConfig(150_000.0, YarnScaling(32.0, 4096.0, 32.0, 1.0, truncate=False), temperature)
    assert config.quantization == MXFP4
    assert config.dtype == "bfloat16"  # although no key says so


def test_both_spellings_mean_the_same() -> None:
    renamed = ("rope_scaling", "rope_theta", "num_local_experts", "initial_context_length", "experts_per_token")
    newer = {"rope_parameters": {**_YARN, "rope_theta": 150000.0}, "num_experts": 32, "swiglu_alpha": 1.702}
    assert _parse(without=renamed, dtype="bfloat16", **newer) == _parse()


def test_absent_keys_take_the_defaults_of_transformers() -> None:
    optional = ("layer_types", "sliding_window", "rope_scaling", "rope_theta", "swiglu_limit", "attention_bias")
    assert _parse(without=(*optional, "rms_norm_eps", "head_dim")) == _parse()


def test_settings_reach_the_model() -> None:
    config = _parse(
        attention_bias=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        num_hidden_layers=3,
        sliding_window=77,
        swiglu_alpha=1.5,
        swiglu_limit=5,
    )
    assert config.sliding_windows == (None, 77, 77)
    assert (config.experts.alpha, config.experts.limit) == (1.5, 5.0)
    assert isinstance(config.attention, GroupedAttention)
    assert not config.attention.qkv_bias
    assert not config.attention.out_bias
    assert _parse(num_hidden_layers=3, layer_types=None).sliding_windows == (128, None, 128)
    unwindowed = _parse(layer_types=["full_attention"] * 24, sliding_window=None)
    assert unwindowed.sliding_windows == (None,) * 24
    assert isinstance(attention := _parse(head_dim=None, num_attention_heads=32).attention, GroupedAttention)
    assert attention.head_dim == 2880 // 32  # null is not absent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["sliding_attention"] * 23}, "layer_types is .*for each of the 24 layers"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types is .*'full_attention' or 'sliding_attention'"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"layer_types": [["full_attention"]] * 24}, "layer_types is "),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": None}, "sliding_window is None, but must be a positive integer"),
        ({"sliding_window": None, "layer_types": None}, "sliding_window is None, but must be a positive integer"),
        ({"swiglu_limit": -7.0}, r"swiglu_limit is -7\.0"),
        ({"swiglu_alpha": "1.702"}, "swiglu_alpha is '1.702'"),
        ({"attention_bias": 1}, "attention_bias is 1"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _parse(**changes)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose experts are MXFP4."""
    path = tmp_path_factory.mktemp("packed") / "m"
    synthesize("gpt_oss", "tiny", 0, {}, path, quantization=MXFP4)
    return path


def _edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def _unpack(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_blocks")]:
        plain = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{plain}_scales")
        tensors[plain] = dequantize_mxfp4(blocks, scales).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mxfp4_experts_compute_what_their_dequantised_weights_do(
    packed: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", {})
    dequantised = {name: tensor.clone() for name, tensor in load_file(packed / "model.safetensors").items()}
    _unpack(dequantised)
    drawn = load_file(plain / "model.safetensors")
    assert dequantised.keys() == drawn.keys()
    changed = {name for name, tensor in drawn.items() if not torch.equal(tensor, dequantised[name])}
    assert len(changed) == 8  # both projections in each of the layers
    save_file(dequantised, plain / "model.safetensors")

    tokens = np.random.default_rng(0).integers(0, 512, 290).tolist()
    got, expected = solo_run(load_decoder(packed, dtype), tokens), solo_run(load_decoder(plain, dtype), tokens)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.kv, expected.kv)
    assert np.array_equal(got.rows, expected.rows)


def _fingerprint(path: Path) -> str:
    return load_model(path, parse_config(path), torch.float32, CPU, progress=False).fingerprint


def _flip(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Changes the last value of the last expert."""
    return lambda tensors: tensors[name].view(torch.uint8).view(-1)[-1:].bitwise_xor_(16)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.gate_up_proj_blocks",
        "mlp.experts.gate_up_proj_scales",
        "mlp.experts.down_proj_blocks",
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
        "mlp.router.bias",
        "self_attn.sinks",
        "self_attn.k_proj.bias",
    ],
)
def test_the_fingerprint_covers_every_kind_of_tensor(packed: Path, tmp_path: Path, name: str) -> None:
    synthesize("gpt_oss", "tiny", 0, {}, tmp_path / "m", quantization=MXFP4)
    assert _fingerprint(tmp_path / "m") == _fingerprint(packed)
    _edit(tmp_path / "m", _flip(f"model.layers.3.{name}"))
    assert _fingerprint(tmp_path / "m") != _fingerprint(packed)


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_half_of_a_quantised_tensor_is_refused(tmp_path: Path, part: str) -> None:
    synthesize("gpt_oss", "tiny", 0, {"num_hidden_layers": 1}, tmp_path / "m", quantization=MXFP4)
    missing = f"model.layers.0.mlp.experts.down_proj_{part}"
    _edit(tmp_path / "m", lambda tensors: tensors.pop(missing))
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        load_decoder(tmp_path / "m")


def test_experts_of_another_size_are_refused_with_both_shapes(packed: Path) -> None:
    config = parse_config(packed)
    wrong = replace(config, experts=replace(config.experts, size=64))
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj has shape \[8, 64, 64\].*\[8, 64, 128\]"):
        load_model(packed, wrong, torch.float32, CPU, progress=False)


@pytest.mark.parametrize("quantised", [False, True])
def test_experts_read_one_at_a_time_are_those_of_the_whole_tensor(tmp_path: Path, quantised: bool) -> None:
    synthesize(
        "gpt_oss", "tiny", 0, {"num_hidden_layers": 1}, tmp_path / "m", quantization=MXFP4 if quantised else None
    )
    config = parse_config(tmp_path / "m")
    digests: list[str] = []
    counted: list[int] = []
    with open_checkpoint(tmp_path / "m", config.quantization) as files:
        for take in (TensorSource.read, TensorSource.slices):
            source = TensorSource(files, torch.float32, CPU, counted.append)
            for name in fused_expert_tensors(config, 0):
                assert torch.equal(torch.stack(list(take(source, name))), files.read(name))
            digests.append(source.fingerprint(config, ""))
    assert digests[0] == digests[1]
    num_bytes = 8 * (64 * 64 + 32 * 64) * 2
    assert sum(counted) == 2 * num_bytes
