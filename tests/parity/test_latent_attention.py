"""Latent attention and its routers in every variety against transformers, which expands keys and values: fp32."""

from pathlib import Path
from typing import Any

import pytest

from common.model.config import LatentAttention
from common.model.families import parse_config
from tests.parity.agreement import Agreement, random_tokens, run_engine
from tests.parity.reference import run_reference
from tests.unit.model.harness import make_checkpoint

#: As published with DeepSeek-V2 and DeepSeek-V3, but for the lengths: one factor each for the softmax and the rotation.
_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 51}
_YARN_V2 = _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
_YARN_V3 = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}

_ODD_SIZES = {
    "hidden_size": 84,
    "kv_lora_rank": 37,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-greedy": ("deepseek_v2", {"topk_method": "greedy"}),
    "v2-compressed-queries": ("deepseek_v2", {"q_lora_rank": 48, "routed_scaling_factor": 16.0}),
    "v2-yarn": ("deepseek_v2", {"rope_scaling": _YARN_V2}),
    "v2-biases": ("deepseek_v2", {"attention_bias": True}),
    "v2-biases-compressed-queries": ("deepseek_v2", {"attention_bias": True, "q_lora_rank": 24}),
    "v2-odd-sizes": ("deepseek_v2", {**_ODD_SIZES, "kv_lora_rank": 38, "qk_nope_head_dim": 10}),
    "v3-yarn": ("deepseek_v3", {"rope_scaling": _YARN_V3}),
    "v3-no-scaling": ("deepseek_v3", {"rope_scaling": None, "rope_theta": 50_000.0}),
    "v3-plain-queries": ("deepseek_v3", {"q_lora_rank": None}),
    "v3-biases": ("deepseek_v3", {"attention_bias": True}),
    "v3-biases-plain-queries": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    "v3-not-interleaved": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3}),
    "v3-no-renorm": ("deepseek_v3", {"norm_topk_prob": False}),
    "v3-other-eps": ("deepseek_v3", {"rms_norm_eps": 1e-2}),
    "v3-odd-sizes": ("deepseek_v3", {**_ODD_SIZES, "q_lora_rank": 29, "n_routed_experts": 12, "n_group": 3}),
}


@pytest.fixture(params=_VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, overrides = _VARIANTS[request.param]
    return make_checkpoint(tmp_path / "m", family, {"num_hidden_layers": 3, **overrides})


def test_logits_and_experts_equal_those_of_transformers(checkpoint: Path) -> None:
    config = parse_config(checkpoint)
    assert isinstance(config.attention, LatentAttention)
    tokens = random_tokens(config.vocab_size)
    agreement = Agreement.of(run_engine(checkpoint, tokens), run_reference(checkpoint, tokens))
    assert agreement.num_differing == 0
    assert agreement.logit_error < 1e-4
    assert agreement.num_sets > 400 * len(config.moe_layers)
