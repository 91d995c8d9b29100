"""Bounds beside sums worked out by hand, for a model small enough for that and for the bench preset."""

import dataclasses

import pytest

from benchmarks.bound import Roofline, StepCost, decode_cost, expected_experts, prefill_cost
from common.model.config import (
    ExpertsConfig,
    GroupedAttention,
    LatentAttention,
    ModelConfig,
    RopeConfig,
    RouterConfig,
)

#: Per layer: projections 2 · 8 · 2 · (4 + 2) = 192 values; router 8 · 4 = 32; an expert 3 · 8 · 6 = 144. Head 10 · 8.
SMALL = ModelConfig(
    family="qwen3_moe",
    vocab_size=10,
    hidden_size=8,
    num_layers=2,
    attention=GroupedAttention(num_heads=4, num_kv_heads=2, head_dim=2, rotary_dim=2),
    experts=ExpertsConfig(num_experts=4, size=6),
    router=RouterConfig(),
    top_k=1,
    dense_size=5,
    moe_layers=frozenset({0, 1}),
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
    max_position_embeddings=100,
    rope=RopeConfig(),
    sliding_windows=(None, None),
    dtype="bfloat16",
)


def test_a_decode_step_of_one_sequence() -> None:
    values = 2 * (192 + 32 + 144) + 80
    kv_bytes = 2 * 5 * (2 * 2 * 2) * 2  # layers, positions, both planes of two heads of two, bf16
    pair_flop = 4 * 4 * 2
    assert decode_cost(SMALL, 1, 5) == StepCost(2 * values + kv_bytes, 2 * values + 2 * 5 * pair_flop)


def test_sequences_share_the_weights_that_they_both_use() -> None:
    """Of four experts, two tokens that choose one each are expected to use 4 · (1 − (3/4)²) = 1.75."""
    values = 2 * (192 + 32 + 1.75 * 144) + 80
    assert decode_cost(SMALL, 2, 5).read_bytes == pytest.approx(2 * values + 2 * 160)
    assert decode_cost(SMALL, 2, 5).flop == 2 * decode_cost(SMALL, 1, 5).flop


def test_a_prompt_has_one_row_of_logits_and_sees_only_what_is_before_it() -> None:
    body = 2 * (192 + 32 + 144)
    pairs = 1 + 2 + 3
    assert prefill_cost(SMALL, 3).flop == 2 * (3 * body + 80) + 2 * pairs * 32


def test_a_window_bounds_the_keys() -> None:
    narrow = dataclasses.replace(SMALL, sliding_windows=(2, None))
    kv_token_bytes = 2 * 2 * 2 * 2
    assert decode_cost(SMALL, 1, 5).read_bytes - decode_cost(narrow, 1, 5).read_bytes == 3 * kv_token_bytes
    # Queries 0, 1, 2, 3 see 1, 2, 2, 2 keys instead of 1, 2, 3, 4.
    assert prefill_cost(SMALL, 4).flop - prefill_cost(narrow, 4).flop == (10 - 7) * 32


def test_dense_layers_and_shared_experts() -> None:
    mixed = dataclasses.replace(
        SMALL, moe_layers=frozenset({1}), experts=ExpertsConfig(num_experts=4, size=6, shared_size=7)
    )
    values = 2 * 192 + (3 * 8 * 5) + (32 + 144 + 3 * 8 * 7) + 80
    assert decode_cost(mixed, 1, 1).flop == 2 * values + 2 * 32


def test_latent_attention() -> None:
    latent = LatentAttention(num_heads=2, query_rank=3, kv_rank=4, plain_dim=5, rotary_dim=2, value_dim=6)
    config = dataclasses.replace(SMALL, attention=latent)
    query = 3 * (8 + 2 * 7)
    keys_and_values = 8 * (4 + 2) + 4 * 2 * (5 + 6)
    values = 2 * (query + keys_and_values + 2 * 6 * 8 + 32 + 144) + 80
    pair_flop = 2 * 2 * (4 + 2) + 2 * 2 * 4  # scores with rotated dimensions, values without
    assert decode_cost(config, 1, 1).flop == 2 * values + 2 * pair_flop
    assert decode_cost(config, 1, 1).read_bytes == 2 * values + 2 * (4 + 2) * 2


def test_the_slower_of_reading_and_computing_bounds() -> None:
    roofline = Roofline(read_bytes_per_s=10.0, bf16_flop_per_s=100.0)
    assert StepCost(read_bytes=50, flop=100).bound_s(roofline) == 5
    assert StepCost(read_bytes=5, flop=100).bound_s(roofline) == 1


@pytest.mark.parametrize(("tokens", "experts"), [(0, 0), (1, 4), (2, 7.5), (10_000, 32)])
def test_expected_experts_of_32_by_4(tokens: int, experts: float) -> None:
    assert expected_experts(32, 4, tokens) == pytest.approx(experts)
