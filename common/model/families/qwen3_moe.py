"""Qwen3-MoE (Qwen3 Technical Report, arXiv 2505.09388)."""

from collections.abc import Mapping
from typing import Any

from common.model.config import ExpertsConfig, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import Family, read_grouped_attention, read_model, sparse_step_layers

_NUM_EXPERTS = ("num_experts", "num_local_experts")


def _read(reader: ConfigReader) -> ModelConfig:
    # As in transformers 5 the window, once switched on, holds in every layer; `max_window_layers` is not read.
    windowed = reader.flag("use_sliding_window", default=False)
    window = reader.optional_count("sliding_window", default=4096) if windowed else None
    bias = reader.flag("attention_bias", default=False)
    return read_model(
        reader,
        "qwen3_moe",
        attention=read_grouped_attention(reader, qkv_bias=bias, out_bias=bias, qk_norm="head", default_num_kv_heads=4),
        experts=ExpertsConfig(reader.count(*_NUM_EXPERTS), reader.count("moe_intermediate_size")),
        router=RouterConfig(normalize=reader.flag("norm_topk_prob", default=False)),
        moe_layers=sparse_step_layers(reader),
        dense_size=reader.count("intermediate_size", default=6144),
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        sliding_windows=(window,) * reader.count("num_hidden_layers"),
    )


def _synthetic(common: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "use_sliding_window": False,
    }


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read, _NUM_EXPERTS, synthetic=_synthetic)
