"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437): latent attention, shared experts, grouped routing.

Keys that are left out mean what they mean in transformers. Where it and DeepSeek's own code compute different things
from one configuration, that is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.model.config import ExpertsConfig, LatentAttention, ModelConfig, RouterConfig
from common.model.config_reader import ConfigReader
from common.model.families.family import Family, all_but_first_layers, read_model
from common.model.rope_config import read_rotary_share, read_softmax_scale_factor

_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What a family has where no key says so."""

    num_shared_experts: int
    #: First layers that are dense.
    num_dense: int = 0
    num_extra_layers: int = 0
    #: None: as many as query heads.
    num_kv_heads: int | None = None


def _read_v2(reader: ConfigReader) -> ModelConfig:
    if reader.flag("norm_topk_prob", default=False):
        reader.fail("norm_topk_prob", True, "false; implementations differ in what it does to the experts' weights")
    if reader.flag("mlp_bias", default=False):
        reader.fail("mlp_bias", True, "false")
    by_groups = reader.text("topk_method", default="greedy") == "group_limited_greedy"
    router = RouterConfig(
        scale=reader.number("routed_scaling_factor", default=1.0),
        fp32=True,
        num_groups=reader.count("n_group") if by_groups else 1,
        num_groups_kept=reader.count("topk_group") if by_groups else 1,
    )
    return _read(reader, "deepseek_v2", router, interleaved=True, defaults=_Defaults(num_shared_experts=2))


def _read_v3(reader: ConfigReader) -> ModelConfig:
    router = RouterConfig(
        scoring="sigmoid",
        normalize=reader.flag("norm_topk_prob", default=True),
        normalize_eps=1e-20,
        scale=reader.number("routed_scaling_factor", default=2.5),
        correction_bias=True,
        fp32=True,
        num_groups=reader.count_not_null("n_group", default=8),
        num_groups_kept=reader.count_not_null("topk_group", default=4),
        num_group_scores=2,
    )
    interleaved = reader.flag("rope_interleave", default=True)
    defaults = _Defaults(num_dense=3, num_extra_layers=1, num_shared_experts=1, num_kv_heads=128)
    return _read(reader, "deepseek_v3", router, interleaved=interleaved, defaults=defaults)


def _read(
    reader: ConfigReader,
    family: str,
    router: RouterConfig,
    *,
    interleaved: bool,
    defaults: _Defaults,
) -> ModelConfig:
    if reader.raw("moe_layer_freq") not in (None, 1):
        wanted = "1; implementations differ in which layers are MoE layers otherwise"
        reader.fail("moe_layer_freq", reader.raw("moe_layer_freq"), wanted)
    size = reader.count("moe_intermediate_size")
    num_shared = _read_num_shared(reader, defaults.num_shared_experts)
    return read_model(
        reader,
        family,
        attention=_read_attention(reader, defaults.num_kv_heads, interleaved=interleaved),
        experts=ExpertsConfig(reader.count(*_NUM_EXPERTS), size, shared_size=num_shared * size or None),
        router=router,
        moe_layers=all_but_first_layers(reader, default=defaults.num_dense),
        dense_size=reader.count("intermediate_size"),
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        num_extra_layers=reader.whole("num_nextn_predict_layers", "num_mtp_layers", default=defaults.num_extra_layers),
    )


def _read_num_shared(reader: ConfigReader, default: int) -> int:
    """Null is 0, as in DeepSeek's own code; transformers refuses it."""
    return 0 if reader.is_null("n_shared_experts") else reader.whole("n_shared_experts", default=default)


def _read_attention(reader: ConfigReader, default_num_kv_heads: int | None, *, interleaved: bool) -> LatentAttention:
    """`head_dim` is not read: where it is present it repeats another size, and not always the same one."""
    num_heads, rotary_dim = reader.count("num_attention_heads"), reader.count("qk_rope_head_dim", default=64)
    num_kv_heads = reader.optional_count("num_key_value_heads", default=default_num_kv_heads) or num_heads
    if num_kv_heads != num_heads:
        reader.fail("num_key_value_heads", num_kv_heads, f"num_attention_heads, {num_heads}")
    if rotary_dim % 2:
        reader.fail("qk_rope_head_dim", rotary_dim, "even")
    read_rotary_share(reader)
    return LatentAttention(
        num_heads=num_heads,
        query_rank=reader.optional_count("q_lora_rank", default=1536),
        kv_rank=reader.count("kv_lora_rank", default=512),
        plain_dim=reader.count("qk_nope_head_dim", default=128),
        rotary_dim=rotary_dim,
        value_dim=reader.count("v_head_dim", default=128),
        bias=reader.flag("attention_bias", default=False),
        scale_factor=read_softmax_scale_factor(reader),
        interleaved=interleaved,
    )


def _synthetic(common: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes in proportions like those of the published models."""
    head_dim = common["head_dim"]
    return {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 4 * head_dim,
        "moe_layer_freq": 1,
        "n_group": 4,
        "num_key_value_heads": common["num_attention_heads"],
        "qk_nope_head_dim": head_dim,
        "qk_rope_head_dim": head_dim // 2,
        "topk_group": 2,
        "v_head_dim": head_dim,
    }


def _synthetic_v2(common: Mapping[str, Any]) -> Mapping[str, Any]:
    return _synthetic(common) | {
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.0,
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
    }


def _synthetic_v3(common: Mapping[str, Any]) -> Mapping[str, Any]:
    return _synthetic(common) | {
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 3 * common["hidden_size"] // 4,
        "rope_interleave": True,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4.0,
            # Unequal, so that cosine and sine have a factor as well as the softmax.
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": common["max_position_embeddings"] // 4,
            "type": "yarn",
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


#: Every synthetic config.json has these, but no DeepSeek one.
_WITHOUT = frozenset({"head_dim", "sliding_window"})

V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _read_v2,
    _NUM_EXPERTS,
    synthetic=_synthetic_v2,
    synthetic_without=_WITHOUT,
)

V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read_v3,
    _NUM_EXPERTS,
    synthetic=_synthetic_v3,
    synthetic_without=_WITHOUT,
)
