"""GLM-4.5 and its successors (arXiv 2508.06471): a sigmoid router with groups, and half-rotated heads."""

from collections.abc import Mapping
from typing import Any

from common.model.config import ExpertsConfig, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import Family, all_but_first_layers, read_grouped_attention, read_model

_NUM_EXPERTS = ("n_routed_experts", "num_local_experts")


def _read(reader: ConfigReader) -> ModelConfig:
    size = reader.count("moe_intermediate_size")
    return read_model(
        reader,
        "glm4_moe",
        attention=read_grouped_attention(
            reader,
            qkv_bias=reader.flag("attention_bias", default=False),
            qk_norm="head" if reader.flag("use_qk_norm", default=False) else None,
            default_rotary_share=0.5,
            default_num_kv_heads=8,
        ),
        experts=ExpertsConfig(
            reader.count(*_NUM_EXPERTS), size, shared_size=size * reader.count("n_shared_experts", default=1)
        ),
        router=RouterConfig(
            scoring="sigmoid",
            normalize=reader.flag("norm_topk_prob", default=True),
            normalize_eps=1e-20,
            scale=reader.number("routed_scaling_factor", default=1.0),
            correction_bias=True,
            fp32=True,
            num_groups=reader.count("n_group", default=1),
            num_groups_kept=reader.count("topk_group", default=1),
            num_group_scores=2,
        ),
        moe_layers=all_but_first_layers(reader, default=1),
        dense_size=reader.count("intermediate_size"),
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        num_extra_layers=reader.whole("num_nextn_predict_layers", "num_mtp_layers", default=1),
    )


def _synthetic(common: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.5,
        "topk_group": 2,
        "use_qk_norm": True,
    }


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _read,
    _NUM_EXPERTS,
    synthetic=_synthetic,
    synthetic_without=frozenset({"sliding_window"}),
)
