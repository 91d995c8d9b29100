"""The same checkpoint in transformers, fp32: logits to 1e-4 and the same experts in every layer and position."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.reference import TIE_GAP, Reference, differing_rows, run_reference
from tests.unit.model.harness import Harness, load_decoder, make_checkpoint

_NUM_TOKENS = 520

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
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
}


@pytest.fixture(params=_VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, overrides = _VARIANTS[request.param]
    return make_checkpoint(tmp_path / "m", family, overrides)


def test_logits_and_experts_equal_those_of_transformers(checkpoint: Path) -> None:
    decoder = load_decoder(checkpoint)
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, decoder.config.vocab_size, _NUM_TOKENS)]
    reference = run_reference(checkpoint, tokens)

    harness = Harness(decoder)
    blocks = harness.blocks_for(_NUM_TOKENS)
    bounds = [0, 200, 201, 202, 400, _NUM_TOKENS]
    logits = torch.cat([harness.all_logits(tokens[a:b], a, blocks) for a, b in pairwise(bounds)])
    rows = harness.rows(blocks, _NUM_TOKENS)

    torch.testing.assert_close(logits, reference.logits_TV, rtol=0, atol=1e-4)
    assert sorted(reference.ids_TK) == sorted(decoder.config.moe_layers)
    assert differing_rows(rows, reference) == []
    dense = sorted(set(range(decoder.config.num_layers)) - decoder.config.moe_layers)
    assert not rows[:, dense].any()


def test_the_comparison_sees_a_wrong_expert_and_forgives_a_tie() -> None:
    scores = np.array([[0.5, 0.3, 0.2], [0.4, 0.30005, 0.3]], np.float32)
    ids = np.array([[0, 1], [0, 1]])
    reference = Reference(torch.empty(0), {1: scores}, {1: ids})
    right = np.zeros((2, 2, 2), np.uint8)
    right[:, 1] = [1, 0]
    assert differing_rows(right, reference) == []

    wrong, tied = right.copy(), right.copy()
    wrong[0, 1] = [0, 2]
    tied[1, 1] = [0, 2]
    assert reference.gap(1, 1) < TIE_GAP < reference.gap(1, 0)
    assert differing_rows(wrong, reference) == [(0, 1)]
    assert differing_rows(tied, reference) == []
