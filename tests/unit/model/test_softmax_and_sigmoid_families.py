"""config.json of Qwen1.5-MoE, OLMoE and GLM-4.5 as published; expected values are those that transformers would use."""

from typing import Any

import pytest

from common.model.config import ExpertsConfig, GroupedAttention, ModelConfig, RopeConfig, RouterConfig
from common.model.families import config_from_json

_COMMON: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}

_QWEN2: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

_OLMOE: dict[str, Any] = {
    **_COMMON,
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 50304,
}

_GLM4: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def _parse(base: dict[str, Any], *, without: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    values = {key: value for key, value in base.items() if key not in without} | changes
    return config_from_json(values, {}, source="config.json")


def test_qwen2_moe() -> None:
    config = _parse(_QWEN2)
    assert config.attention == GroupedAttention(16, 16, 128, rotary_dim=128, qkv_bias=True)
    assert config.experts == ExpertsConfig(60, 1408, shared_size=5632, shared_gate=True)
    assert (config.router, config.top_k) == (RouterConfig(), 4)
    assert config.moe_layers == frozenset(range(24))
    assert config.sliding_windows == (None,) * 24


def test_olmoe() -> None:
    config = _parse(_OLMOE)
    assert config.attention == GroupedAttention(16, 16, 128, rotary_dim=128, qk_norm="all")
    assert (config.experts, config.router) == (ExpertsConfig(64, 1024), RouterConfig())
    assert config.rope == RopeConfig(theta=10_000.0)
    clipped = _parse(_OLMOE, clip_qkv=8, attention_bias=True).attention
    assert clipped == GroupedAttention(16, 16, 128, 128, qkv_bias=True, out_bias=True, qk_norm="all", clip_qkv=8.0)


def test_glm4_moe() -> None:
    config = _parse(_GLM4)
    assert config.attention == GroupedAttention(96, 8, 128, rotary_dim=64, qkv_bias=True)
    assert config.experts == ExpertsConfig(128, 1408, shared_size=1408)
    assert config.router == RouterConfig(
        "sigmoid", normalize=True, normalize_eps=1e-20, correction_bias=True, fp32=True, num_group_scores=2
    )
    assert config.moe_layers == frozenset(range(1, 46))
    assert (config.dense_size, config.num_extra_layers) == (10944, 1)
    grouped = _parse(_GLM4, n_group=8, topk_group=4, routed_scaling_factor=2.5, n_shared_experts=2, use_qk_norm=True)
    assert (grouped.router.num_groups, grouped.router.num_groups_kept, grouped.router.scale) == (8, 4, 2.5)
    assert grouped.experts.shared_size == 2816
    assert isinstance(grouped.attention, GroupedAttention)
    assert grouped.attention.qk_norm == "head"


def test_absent_keys_take_the_family_defaults() -> None:
    qwen2 = _parse(_QWEN2, without=("rope_theta", "rms_norm_eps", "norm_topk_prob", "decoder_sparse_step"))
    assert (qwen2.rope.theta, qwen2.rms_norm_eps, qwen2.router.normalize) == (10_000.0, 1e-6, False)
    olmoe = _parse(_OLMOE, without=("attention_bias", "num_key_value_heads", "rms_norm_eps"))
    assert olmoe.attention == _parse(_OLMOE).attention
    assert olmoe.rms_norm_eps == 1e-5
    optional = ("attention_bias", "norm_topk_prob", "partial_rotary_factor", "n_group", "topk_group", "use_qk_norm")
    more = ("routed_scaling_factor", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
    glm4 = _parse(_GLM4, without=(*optional, *more))
    assert glm4.attention == GroupedAttention(96, 8, 128, rotary_dim=64)
    assert (glm4.router, glm4.experts, glm4.moe_layers) == (
        _parse(_GLM4).router,
        _parse(_GLM4).experts,
        frozenset(range(1, 46)),
    )


def test_qwen2_moe_windows() -> None:
    windowed: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 100, "num_hidden_layers": 6}
    assert _parse(_QWEN2, **windowed, max_window_layers=3).sliding_windows == (100, None, 100, None, None, None)
    assert _parse(_QWEN2, **windowed).sliding_windows == (100, None) * 3
    kinds = ["full_attention", "sliding_attention"]
    assert _parse(_QWEN2, **windowed, layer_types=kinds * 3).sliding_windows == (None, 100) * 3


@pytest.mark.parametrize(
    ("family", "key"), [("qwen2_moe", "num_experts"), ("olmoe", "num_experts"), ("glm4_moe", "n_routed_experts")]
)
def test_both_spellings_mean_the_same(family: str, key: str) -> None:
    base = {"qwen2_moe": _QWEN2, "olmoe": _OLMOE, "glm4_moe": _GLM4}[family]
    newer: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_local_experts": base[key],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(base["rope_theta"])},
    }
    if family == "glm4_moe":
        newer["rope_parameters"]["partial_rotary_factor"] = 0.5
        newer["num_mtp_layers"] = 1
    older = (key, "torch_dtype", "rope_theta", "rope_scaling", "partial_rotary_factor", "num_nextn_predict_layers")
    assert _parse(base, without=older, **newer) == _parse(base)
