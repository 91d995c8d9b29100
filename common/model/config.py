"""What a checkpoint's config.json says, in one spelling for every family. Imports no torch, so that a wrong model is
refused before anything heavy loads."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.errors import CheckpointError
from common.model.quantized.config import Quantization
from common.model.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from common.routing.record import RoutingLayout


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how positions beyond the trained range are scaled."""

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    #: Of cosine and sine: what YaRN and LongRoPE make up with for a longer context.
    attention_factor: float = 1.0

    def longest_context(self, max_position_embeddings: int) -> int:
        """Positions that the scaling is meant for.

        Checkpoints with linear or dynamic scaling declare the original length as `max_position_embeddings`, those with
        LongRoPE the scaled one. With YaRN and Llama 3's scaling some declare the scaled length (DeepSeek, gpt-oss), and
        others still that of before scaling was switched on (Qwen), so there the original length counts, `factor` times.
        """
        match self.scaling:
            case LinearScaling(factor) | DynamicScaling(factor):
                scaled = factor * max_position_embeddings
            case YarnScaling(factor, original_length) | Llama3Scaling(factor=factor, original_length=original_length):
                scaled = factor * original_length
            case _:
                scaled = max_position_embeddings
        return max(int(scaled), max_position_embeddings)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention: every KV head serves num_heads / num_kv_heads query heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Leading dimensions of each head that rotate with the position.
    rotary_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    #: What the norm of queries, and that of keys, is taken over: each head, or all heads together.
    qk_norm: Literal["head", "all", None] = None
    #: Bound of the absolute values of queries, keys and values.
    clip_qkv: float | None = None
    #: Each query head has a learned logit that takes part in the softmax and brings no value.
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are read from one cached vector,
    which is `kv_rank` compressed dimensions and `rotary_dim` rotated ones.
    """

    num_heads: int
    #: None: queries are projected at once, not through a compressed vector.
    query_rank: int | None
    kv_rank: int
    #: Dimensions of a query and key head that do not rotate, and that do.
    plain_dim: int
    rotary_dim: int
    value_dim: int
    #: Of the two projections into compressed vectors, and of the output.
    bias: bool = False
    #: Factor of the softmax's scale.
    scale_factor: float = 1.0
    #: The rotated pairs are dimensions (2 i, 2 i + 1), not (i, i + rotary_dim / 2).
    interleaved: bool = True


AttentionConfig = GroupedAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a token's experts are chosen and weighed."""

    #: What ranks the experts and, unless they are "chosen_softmax", weighs them. With that, logits rank, and the
    #: softmax over those of the chosen ones weighs.
    scoring: Literal["softmax", "sigmoid", "chosen_softmax"] = "softmax"
    #: Weights of the chosen experts are divided by their sum.
    normalize: bool = False
    #: Added to that sum, against 0.
    normalize_eps: float = 0.0
    #: Factor of the weights, applied last.
    scale: float = 1.0
    #: Added to the logits.
    bias: bool = False
    #: Added to the scores for the choice only, not for the weights.
    correction_bias: bool = False
    #: Logits are computed from fp32 copies of weight and input, whatever the model's dtype.
    fp32: bool = False
    #: Experts are chosen from the best `num_groups_kept` of `num_groups` groups of consecutive experts, ranked by the
    #: sum of their best `num_group_scores` experts.
    num_groups: int = 1
    num_groups_kept: int = 1
    num_group_scores: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The feed-forward networks of an MoE layer."""

    num_experts: int
    #: Width of each.
    size: int
    bias: bool = False
    #: "swiglu": silu(gate) * up. "clamped_swiglu" (gpt-oss): both clamped to `limit`, gate * sigmoid(alpha * gate) *
    #: (up + 1).
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    alpha: float = 1.0
    limit: float = 0.0
    #: Width of the network that every token goes through beside its experts; None: there is none.
    shared_size: int | None = None
    #: The shared network's output is weighed by the sigmoid of a learned product.
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One MoE decoder. Families differ only in these values (and in how their tensors are named)."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionConfig
    experts: ExpertsConfig
    router: RouterConfig
    #: Experts per token.
    top_k: int
    #: Width of the feed-forward block in dense layers.
    dense_size: int
    #: Which layers are MoE layers; the others are dense.
    moe_layers: frozenset[int]
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    #: Keys seen by a query (itself included), per layer; None is full attention.
    sliding_windows: tuple[int | None, ...]
    #: What the checkpoint declares, as torch spells it; taken for dtype "auto", which refuses what is not computed.
    dtype: str
    eos_token_ids: frozenset[int] = frozenset()
    #: How the weights are stored, where that is not as plain numbers.
    quantization: Quantization | None = None
    #: Layers behind the last one that predict further tokens; their tensors are left alone.
    num_extra_layers: int = 0

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.attention.num_heads

    @property
    def num_kv_planes(self) -> int:
        """Vectors that are cached per token, layer and head."""
        return 1 if isinstance(self.attention, LatentAttention) else 2

    @property
    def num_kv_heads(self) -> int:
        return 1 if isinstance(self.attention, LatentAttention) else self.attention.num_kv_heads

    @property
    def kv_dim(self) -> int:
        """Size of a cached vector."""
        if isinstance(self.attention, LatentAttention):
            return self.attention.kv_rank + self.attention.rotary_dim
        return self.attention.head_dim

    @property
    def routing(self) -> RoutingLayout:
        return RoutingLayout(self.num_layers, self.top_k, self.num_experts)


def read_json(path: Path) -> dict[str, Any]:
    """Parses one JSON object. Raises CheckpointError naming the file if it is missing or broken."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a Hugging Face checkpoint directory is needed") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: its values are nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
