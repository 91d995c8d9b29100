"""OLMoE (Muennighoff et al., arXiv 2409.02060): queries and keys are normed over all heads together."""

from collections.abc import Mapping
from typing import Any

from common.model.config import ExpertsConfig, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import Family, read_grouped_attention, read_model

_NUM_EXPERTS = ("num_experts", "num_local_experts")


def _read(reader: ConfigReader) -> ModelConfig:
    bias = reader.flag("attention_bias", default=False)
    clip_qkv = None if reader.raw("clip_qkv") is None else reader.number("clip_qkv")
    return read_model(
        reader,
        "olmoe",
        attention=read_grouped_attention(reader, qkv_bias=bias, out_bias=bias, qk_norm="all", clip_qkv=clip_qkv),
        experts=ExpertsConfig(reader.count(*_NUM_EXPERTS), reader.count("intermediate_size")),
        router=RouterConfig(normalize=reader.flag("norm_topk_prob", default=False)),
        moe_layers=frozenset(range(reader.count("num_hidden_layers"))),
        dense_size=reader.count("intermediate_size"),
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
    )


def _synthetic(common: Mapping[str, Any]) -> Mapping[str, Any]:
    # Queries, keys and values have a standard deviation of about 1, so that the bound clips every eighth of them.
    return {"attention_bias": True, "clip_qkv": 1.5, "norm_topk_prob": False}


FAMILY = Family(
    "olmoe",
    "OlmoeForCausalLM",
    _read,
    _NUM_EXPERTS,
    synthetic=_synthetic,
    synthetic_without=frozenset({"head_dim", "sliding_window"}),
    expert_size_key="intermediate_size",
)
