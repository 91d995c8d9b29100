"""gpt-oss (OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925)."""

from collections.abc import Mapping
from typing import Any

from common.model.config import ExpertsConfig, GroupedAttention, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import Family, TensorNames, read_grouped_attention, read_model, read_windows

_NUM_EXPERTS = ("num_local_experts", "num_experts")

#: What transformers assumes where config.json says nothing of scaling; published checkpoints say the same.
_ROPE_SECTION: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(reader: ConfigReader) -> ModelConfig:
    num_layers = reader.count("num_hidden_layers")
    experts = ExpertsConfig(
        num_experts=reader.count(*_NUM_EXPERTS),
        size=reader.count("intermediate_size"),
        bias=True,
        activation="clamped_swiglu",
        alpha=reader.number("swiglu_alpha", default=1.702),
        limit=reader.number("swiglu_limit", default=7.0),
    )
    return read_model(
        reader,
        "gpt_oss",
        attention=_read_attention(reader),
        experts=experts,
        router=RouterConfig(scoring="chosen_softmax", bias=True),
        moe_layers=frozenset(range(num_layers)),
        dense_size=experts.size,
        rope_theta=150_000.0,
        rope_section=_ROPE_SECTION,
        rms_norm_eps=1e-5,
        # Every other layer attends to a window, from the first on, unless `layer_types` says which.
        sliding_windows=read_windows(reader, 128, range(0, num_layers, 2)),
        # Published checkpoints leave it out, and hold bfloat16 beside the quantised experts.
        dtype="bfloat16",
    )


def _read_attention(reader: ConfigReader) -> GroupedAttention:
    bias = reader.flag("attention_bias", default=True)
    return read_grouped_attention(
        reader, qkv_bias=bias, out_bias=bias, sinks=True, default_head_dim=64, default_num_kv_heads=8
    )


def _synthetic(common: Mapping[str, Any]) -> Mapping[str, Any]:
    length = common["max_position_embeddings"]
    original_length = length // int(_ROPE_SECTION["factor"])
    return {
        "attention_bias": True,
        "initial_context_length": original_length,
        # Alternating; left out, so that it goes with any number of layers.
        "layer_types": None,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**_ROPE_SECTION, "original_max_position_embeddings": original_length},
        "rope_theta": 150_000.0,
        # Far below the length of a prompt, as published.
        "sliding_window": length // 64,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read,
    _NUM_EXPERTS,
    TensorNames(router="router", experts="fused"),
    synthetic=_synthetic,
    expert_size_key="intermediate_size",
)
