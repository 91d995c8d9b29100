"""What a step must at least read and compute, and how long that takes a machine: the bounds beside measured times.

Weights count once per step (those of experts: as many as are expected to be chosen), keys and values once per query
that sees them. Activations, norms and the rows of the embedding are left out; they are less than a per cent.
"""

from dataclasses import dataclass

from common.model.config import AttentionConfig, GroupedAttention, ModelConfig

#: Of bf16, in which weights and cache are kept.
VALUE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the machine does at best, with every core that the process may use."""

    read_bytes_per_s: float
    bf16_flop_per_s: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step, or several, must do."""

    read_bytes: float
    flop: float

    def bound_s(self, roofline: Roofline) -> float:
        """Seconds, if reading and computing overlap perfectly."""
        return max(self.read_bytes / roofline.read_bytes_per_s, self.flop / roofline.bf16_flop_per_s)


def decode_cost(config: ModelConfig, num_sequences: int, context: int) -> StepCost:
    """One step of `num_sequences` sequences, each of `context` tokens including the one it computes."""
    touched = expected_experts(config.num_experts, config.top_k, num_sequences)
    keys = sum(_seen(context, window) for window in config.sliding_windows)
    kv_bytes = config.num_kv_planes * config.num_kv_heads * config.kv_dim * VALUE_BYTES
    read = VALUE_BYTES * _values(config, touched) + num_sequences * keys * kv_bytes
    flop = num_sequences * (2 * _values(config, config.top_k) + keys * _pair_flop(config.attention))
    return StepCost(read, flop)


def prefill_cost(config: ModelConfig, num_tokens: int) -> StepCost:
    """A whole prompt in one step: logits of its last token only."""
    touched = expected_experts(config.num_experts, config.top_k, num_tokens)
    pairs = sum(_pairs(num_tokens, window) for window in config.sliding_windows)
    head = config.vocab_size * config.hidden_size
    flop = 2 * (num_tokens * (_values(config, config.top_k) - head) + head) + pairs * _pair_flop(config.attention)
    return StepCost(VALUE_BYTES * _values(config, touched), flop)


def expected_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Distinct experts that so many tokens choose, if every choice is as likely as any other."""
    return float(num_experts * (1 - (1 - top_k / num_experts) ** num_tokens))


def _values(config: ModelConfig, num_experts: float) -> float:
    """Values in the matrices of a step in which each MoE layer uses so many experts."""
    hidden = config.hidden_size
    num_moe = len(config.moe_layers)
    expert = 3 * hidden * config.experts.size
    shared = 3 * hidden * (config.experts.shared_size or 0)
    moe = num_moe * (num_experts * expert + shared + hidden * config.num_experts)
    dense = (config.num_layers - num_moe) * 3 * hidden * config.dense_size
    return moe + dense + config.num_layers * _attention_values(config) + config.vocab_size * hidden


def _attention_values(config: ModelConfig) -> int:
    """Values in the projections of one layer."""
    a, hidden = config.attention, config.hidden_size
    if isinstance(a, GroupedAttention):
        return 2 * hidden * a.head_dim * (a.num_heads + a.num_kv_heads)
    query_dim = a.num_heads * (a.plain_dim + a.rotary_dim)
    query = hidden * query_dim if a.query_rank is None else a.query_rank * (hidden + query_dim)
    down = hidden * (a.kv_rank + a.rotary_dim)
    up = a.kv_rank * a.num_heads * (a.plain_dim + a.value_dim)
    return query + down + up + a.num_heads * a.value_dim * hidden


def _pair_flop(attention: AttentionConfig) -> int:
    """Of one query and one key, over all heads of a layer: the score, and the value's part of the output."""
    if isinstance(attention, GroupedAttention):
        return 4 * attention.num_heads * attention.head_dim
    return 2 * attention.num_heads * (2 * attention.kv_rank + attention.rotary_dim)


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(num_tokens: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    full = _seen(num_tokens, window)
    return full * (full + 1) // 2 + (num_tokens - full) * full
