"""Settings that a family's own checkpoint leaves out, against transformers in fp32; and the rule of comparison."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.model.families import parse_config
from deploy.verify.router_tap import Choices
from deploy.verify.transformers_oracle import TIE
from tests.parity.agreement import Agreement, Answer, random_tokens, run_engine
from tests.parity.reference import Reference, differing_rows, run_reference
from tests.unit.model.harness import make_checkpoint

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe-bias": ("qwen3_moe", {"attention_bias": True}),
    "qwen3_moe-dense-list": ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    "qwen3_moe-dense-step": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe-no-renorm": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 100}),
    "mixtral-window": ("mixtral", {"sliding_window": 300}),
    "qwen3_moe-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3_moe-top-1": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "mixtral-all-experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}),
    "qwen3_moe-257-experts": ("qwen3_moe", {"num_experts": 257, "num_experts_per_tok": 8, "num_hidden_layers": 2}),
    "qwen3_moe-yarn": ("qwen3_moe", {"rope_scaling": _YARN}),
    "mixtral-yarn-explicit": (
        "mixtral",
        {"rope_scaling": {**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False}},
    ),
    "mixtral-linear": ("mixtral", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen3_moe-llama3": ("qwen3_moe", {"rope_scaling": _LLAMA3, "rope_theta": 500_000.0}),
    "qwen3_moe-multi-head": ("qwen3_moe", {"num_key_value_heads": 4, "head_dim": 32}),
    "qwen2_moe-plain": (
        "qwen2_moe",
        {"use_sliding_window": False, "qkv_bias": False, "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "qwen2_moe-layer-types": (
        "qwen2_moe",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "qwen2_moe-window-below": ("qwen2_moe", {"max_window_layers": 1, "sliding_window": 50}),
    "olmoe-plain": ("olmoe", {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": True}),
    "olmoe-multi-head": ("olmoe", {"num_key_value_heads": 4}),
    "glm4_moe-plain": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False}),
    "glm4_moe-large-groups": ("glm4_moe", {"n_routed_experts": 24, "n_group": 3, "num_experts_per_tok": 5}),
    "glm4_moe-one-group": ("glm4_moe", {"n_group": 1, "topk_group": 1}),
    "glm4_moe-more-shared": ("glm4_moe", {"n_shared_experts": 3, "first_k_dense_replace": 2}),
    "glm4_moe-rotary-share": ("glm4_moe", {"partial_rotary_factor": 0.25, "rope_scaling": _YARN}),
}


@pytest.fixture(params=_VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, overrides = _VARIANTS[request.param]
    return make_checkpoint(tmp_path / "m", family, overrides)


def test_experts_and_logits_equal_those_of_transformers(checkpoint: Path) -> None:
    config = parse_config(checkpoint)
    tokens = random_tokens(config.vocab_size)
    answer = run_engine(checkpoint, tokens)
    agreement = Agreement.of(answer, run_reference(checkpoint, tokens))
    assert agreement.num_differing == 0
    assert agreement.logit_error < 1e-4
    assert agreement.num_sets > 400 * len(config.moe_layers)
    dense = sorted(set(range(config.num_layers)) - config.moe_layers)
    assert not answer.rows_TLK[:, dense].any()


# Three positions of a model whose layer 1 is its only MoE layer.
_REFERENCE = Reference(
    logits_TV=torch.tensor([[3.0, 4.0], [-3.0, 4.0], [3.0, -4.0]]),
    choices=Choices(torch.tensor([[[0, 1]], [[0, 1]], [[0, 1]]]), torch.tensor([[0.1], [TIE / 2], [0.1]])),
    moe_layers=[1],
)


def _rows(*chosen: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    rows_TLK = np.zeros((3, 2, 2), np.uint8)
    rows_TLK[:, 1] = chosen
    return rows_TLK


def test_the_order_of_experts_does_not_matter() -> None:
    same = Agreement.of(Answer(_REFERENCE.logits_TV, _rows((1, 0), (0, 1), (1, 0))), _REFERENCE)
    assert (same.num_sets, same.num_differing, same.tied) == (3, 0, False)


def test_every_unequal_set_is_counted_from_the_first_one_that_is_no_tie_on() -> None:
    all_wrong = Agreement.of(Answer(_REFERENCE.logits_TV, _rows((0, 2), (2, 3), (1, 3))), _REFERENCE)
    assert (all_wrong.num_sets, all_wrong.num_differing, all_wrong.tied) == (3, 3, False)
    # What would be a tie by itself is no excuse behind a difference that is none.
    assert differing_rows(_rows((0, 2), (2, 3), (0, 1)), _REFERENCE) == [(0, 1), (1, 1)]
    two_wrong = Agreement.of(Answer(_REFERENCE.logits_TV, _rows((0, 2), (2, 3), (0, 1))), _REFERENCE)
    assert (two_wrong.num_sets, two_wrong.num_differing, two_wrong.tied) == (3, 2, False)
    # Nothing is compared from a tie on, because it comes from other values.
    tie_first = Agreement.of(Answer(_REFERENCE.logits_TV, _rows((0, 1), (2, 3), (1, 3))), _REFERENCE)
    assert (tie_first.num_sets, tie_first.num_differing, tie_first.tied) == (1, 0, True)
    last_wrong = Agreement.of(Answer(_REFERENCE.logits_TV, _rows((0, 1), (0, 1), (1, 3))), _REFERENCE)
    assert (last_wrong.num_sets, last_wrong.num_differing, last_wrong.tied) == (3, 1, False)


def test_logits_count_relative_to_their_scale_and_only_before_a_tie() -> None:
    logits_TV = _REFERENCE.logits_TV.clone()
    logits_TV[0, 1] += 0.5
    logits_TV[2] = 0.0
    root_mean_square = 12.5**0.5
    whole = Agreement.of(Answer(logits_TV, _rows((0, 1), (0, 1), (0, 1))), _REFERENCE)
    assert (whole.num_sets, whole.tied) == (3, False)
    assert whole.logit_error == pytest.approx(4 / root_mean_square)
    tied = Agreement.of(Answer(logits_TV, _rows((0, 1), (0, 2), (0, 1))), _REFERENCE)
    assert (tied.num_sets, tied.num_differing, tied.tied) == (1, 0, True)
    assert tied.logit_error == pytest.approx(0.5 / root_mean_square)
