"""Qwen1.5-MoE and Qwen2-MoE (Qwen2 Technical Report, arXiv 2407.10671): a gated shared expert beside the others."""

from collections.abc import Mapping
from typing import Any

from common.model.config import ExpertsConfig, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import (
    Family,
    TensorNames,
    read_grouped_attention,
    read_model,
    read_windows,
    sparse_step_layers,
)

_NUM_EXPERTS = ("num_experts", "num_local_experts")


def _read(reader: ConfigReader) -> ModelConfig:
    return read_model(
        reader,
        "qwen2_moe",
        attention=read_grouped_attention(
            reader, qkv_bias=reader.flag("qkv_bias", default=True), default_num_kv_heads=16
        ),
        experts=ExpertsConfig(
            reader.count(*_NUM_EXPERTS),
            reader.count("moe_intermediate_size"),
            shared_size=reader.count("shared_expert_intermediate_size"),
            shared_gate=True,
        ),
        router=RouterConfig(normalize=reader.flag("norm_topk_prob", default=False)),
        moe_layers=sparse_step_layers(reader),
        dense_size=reader.count("intermediate_size", default=5632),
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        sliding_windows=_sliding_windows(reader),
    )


def _sliding_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Once switched on, the window holds in every other layer below `max_window_layers`, as in transformers 5."""
    if not reader.flag("use_sliding_window", default=False):
        return (None,) * reader.count("num_hidden_layers")
    windowed = range(0, reader.whole("max_window_layers", default=28), 2)
    return read_windows(reader, 4096, windowed)


def _synthetic(common: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "layer_types": None,
        "max_window_layers": common["num_hidden_layers"] - 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 2 * common["moe_intermediate_size"],
        "sliding_window": common["max_position_embeddings"] // 8,
        "use_sliding_window": True,
    }


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    _read,
    _NUM_EXPERTS,
    TensorNames(shared="shared_expert"),
    synthetic=_synthetic,
)
