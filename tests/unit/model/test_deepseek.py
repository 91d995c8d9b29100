"""config.json of DeepSeek-V2 and DeepSeek-V3 as published and as transformers 5 saves them, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from common.errors import CheckpointError
from common.model.config import ExpertsConfig, LatentAttention, ModelConfig, RouterConfig
from common.model.families import config_from_json, parse_config
from common.model.presets import synthetic_config
from common.model.tensors import checkpoint_tensors
from tests.unit.model.harness import load_decoder, make_checkpoint, solo_run

_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}

#: As deepseek-ai/DeepSeek-V2-Lite.
_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "eos_token_id": 100001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

#: What deepseek-ai/DeepSeek-V2 has otherwise.
_V2: dict[str, Any] = _V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}

#: As deepseek-ai/DeepSeek-V3.
_V3: dict[str, Any] = _V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def _parse(base: dict[str, Any], *, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    values = {key: value for key, value in base.items() if key not in without} | changes
    return config_from_json(values, {}, source="config.json")


def _num_parameters(config: ModelConfig) -> int:
    return sum(map(math.prod, checkpoint_tensors(config).values()))


def test_deepseek_v2_lite() -> None:
    config = _parse(_V2_LITE)
    attention = config.attention
    assert isinstance(attention, LatentAttention)
    assert (attention.num_heads, attention.query_rank, attention.kv_rank) == (16, None, 512)
    assert (attention.plain_dim, attention.rotary_dim, attention.value_dim) == (128, 64, 128)
    # 0.1 · 0.707 · ln(40) + 1, squared; the factors of cosine and sine cancel.
    assert attention.scale_factor == pytest.approx(1.260804**2, rel=1e-6)
    assert config.rope.attention_factor == 1
    assert config.router == RouterConfig(fp32=True)
    assert config.experts == ExpertsConfig(64, 1408, shared_size=2816)
    assert config.moe_layers == frozenset(range(1, 27))
    assert (config.num_kv_planes, config.num_kv_heads, config.kv_dim) == (1, 1, 576)
    assert round(_num_parameters(config) / 1e9, 1) == 15.7


def test_deepseek_v2() -> None:
    config = _parse(_V2)
    assert config.router == RouterConfig(scale=16.0, fp32=True, num_groups=8, num_groups_kept=3)
    assert isinstance(config.attention, LatentAttention)
    assert config.attention.query_rank == 1536
    assert round(_num_parameters(config) / 1e9) == 236


def test_deepseek_v3() -> None:
    config = _parse(_V3)
    assert config.router == RouterConfig(
        scoring="sigmoid",
        normalize=True,
        normalize_eps=1e-20,
        scale=2.5,
        correction_bias=True,
        fp32=True,
        num_groups=8,
        num_groups_kept=4,
        num_group_scores=2,
    )
    assert (config.experts.shared_size, config.num_extra_layers) == (2048, 1)
    assert config.moe_layers == frozenset(range(3, 61))
    assert round(_num_parameters(config) / 1e9) == 671


@pytest.mark.parametrize("base", [_V2_LITE, _V2, _V3])
def test_what_transformers_saves_means_the_same(base: dict[str, Any], tmp_path: Path) -> None:
    """It renames `rope_scaling`, drops `scoring_func` and others, and adds `head_dim`: that of the rotation."""
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(base))
    AutoConfig.from_pretrained(published).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["head_dim"] == 64
    assert not {"rope_scaling", "rope_theta"} & saved.keys()
    assert parse_config(tmp_path / "saved") == _parse(base)


def test_absent_keys_take_the_family_defaults() -> None:
    optional = ("topk_method", "scoring_func", "first_k_dense_replace", "moe_layer_freq", "routed_scaling_factor")
    assert _parse(_V2_LITE, without=optional).moe_layers == frozenset(range(27))
    assert _parse(_V2_LITE, without=optional).router == _parse(_V2_LITE).router
    more = ("norm_topk_prob", "num_nextn_predict_layers", "n_group", "topk_group", "n_shared_experts", "q_lora_rank")
    assert _parse(_V3, without=(*optional, *more, "num_key_value_heads")) == _parse(_V3)
    assert _parse(_V2, without=("q_lora_rank", "n_shared_experts", "num_key_value_heads")) == _parse(_V2)
    assert _parse(_V3, norm_topk_prob=None).router == _parse(_V3, norm_topk_prob=False).router


def test_one_group_is_both_ways_of_choosing() -> None:
    by_groups = _parse(_V2_LITE, topk_method="group_limited_greedy", n_group=1, topk_group=1)
    assert by_groups == _parse(_V2_LITE)


@pytest.mark.parametrize("value", [None, 0])
def test_there_may_be_no_shared_experts(value: int | None) -> None:
    config = _parse(_V3, n_shared_experts=value)
    assert config.experts.shared_size is None
    assert not [name for name in checkpoint_tensors(config) if "shared" in name]


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (_V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'.*'greedy'"),
        (_V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'.*'softmax'"),
        (_V2, {"norm_topk_prob": True}, "norm_topk_prob is True.*false"),
        (_V2, {"moe_layer_freq": 2}, "moe_layer_freq is 2.*1"),
        (_V2, {"mlp_bias": True}, "mlp_bias is True"),
        (_V2, {"num_key_value_heads": 8}, "num_key_value_heads is 8.*128"),
        (_V2, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63.*even"),
        (_V2, {"n_group": None}, "n_group is missing"),
        (_V2, {"n_group": 7}, "n_group is 7.*160"),
        (_V2, {"topk_group": 9}, "topk_group is 9.*8"),
        (_V2, {"q_lora_rank": 0}, "q_lora_rank is 0"),
        (_V2, {"kv_lora_rank": "512"}, "kv_lora_rank is '512'"),
        (_V2, {"n_shared_experts": -1}, "n_shared_experts is -1"),
        (_V2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'.*'noaux_tc'"),
        (_V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'.*'sigmoid'"),
        (_V3, {"scoring_func": "sqrtsoftplus"}, "scoring_func is 'sqrtsoftplus'"),
        (_V3, {"n_group": None}, "n_group is None, but must be a positive integer"),
        (_V3, {"n_group": 256}, "n_group is 256.*2 experts"),
        (_V3, {"topk_group": 0}, "topk_group is 0"),
        (_V3, {"rope_interleave": "yes"}, "rope_interleave is 'yes'"),
        (_V3, {"n_routed_experts": None}, "dense model"),
        (_V3, {"first_k_dense_replace": 61}, "no MoE layer"),
    ],
)
def test_refusals_name_the_key(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        _parse(base, **changes)


def _edit(path: Path, **tensors: torch.Tensor | None) -> None:
    """Adds or replaces tensors; those that are None are removed."""
    file = path / "model.safetensors"
    values = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in values.items() if tensor is not None}, file, metadata={"format": "pt"})


_ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        (f"{_ATTENTION}.kv_b_proj.weight", None, "kv_b_proj.weight is missing"),
        (f"{_ATTENTION}.kv_a_layernorm.weight", None, "kv_a_layernorm.weight is missing"),
        (f"{_ATTENTION}.kv_b_proj.weight", torch.zeros(128, 63), r"\[128, 63\].*\[128, 64\]"),
        (f"{_ATTENTION}.q_proj.weight", torch.zeros(96, 64), "q_proj.weight is unknown"),
        ("model.layers.1.mlp.gate.e_score_correction_bias", None, "e_score_correction_bias is missing"),
        ("model.layers.3.eh_proj.weight", torch.zeros(64, 128), "eh_proj.weight is unknown"),
    ],
)
def test_a_wrong_checkpoint_is_refused(tmp_path: Path, name: str, tensor: torch.Tensor | None, words: str) -> None:
    path = make_checkpoint(tmp_path / "m", "deepseek_v3", {"num_hidden_layers": 2})
    _edit(path, **{name: tensor})
    with pytest.raises(CheckpointError, match=words):
        load_decoder(path)


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "deepseek_v3", {"num_hidden_layers": 2, "num_nextn_predict_layers": 1})
    expected = solo_run(load_decoder(path), [5, 6, 7]).logits
    _edit(path, **{"model.layers.2.eh_proj.weight": torch.zeros(64, 128)})
    assert torch.equal(solo_run(load_decoder(path), [5, 6, 7]).logits, expected)


@pytest.mark.parametrize(("family", "millions"), [("deepseek_v2", 702), ("deepseek_v3", 689)])
def test_the_bench_preset_has_a_sensible_size(family: str, millions: int) -> None:
    config = config_from_json(synthetic_config(family, "bench", {}), {}, source="config.json")
    assert round(_num_parameters(config) / 1e6) == millions
    assert (config.kv_dim, config.num_experts, config.top_k) == (288, 32, 4)
