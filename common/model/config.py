"""What a checkpoint's config.json says, in one spelling for every family. Imports no torch, so that a wrong model is
refused before anything heavy loads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.routing.record import RoutingLayout


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how positions beyond the trained range are scaled."""

    theta: float = 10_000.0
    #: "default", "linear", "llama3" or "yarn"; dynamic kinds are refused because they cannot be chunked exactly.
    kind: str = "default"
    #: What the kind needs, as `common.model.rope_config` reads it; every default is filled in.
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One MoE decoder. Families differ only in these values (and in how their tensors are named)."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    expert_size: int
    #: Width of the feed-forward block in dense layers.
    dense_size: int
    #: Which layers are MoE layers; the others are dense.
    moe_layers: frozenset[int]
    norm_topk_prob: bool
    qk_norm: bool
    attention_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    #: Keys seen by a query (itself included), per layer; None is full attention.
    sliding_windows: tuple[int | None, ...]
    #: "float32" or "bfloat16": what the checkpoint declares; used for dtype "auto".
    dtype: str
    eos_token_ids: frozenset[int]

    @property
    def routing(self) -> RoutingLayout:
        return RoutingLayout(self.num_layers, self.top_k, self.num_experts)


def read_json(path: Path) -> dict[str, Any]:
    """Parses one JSON object. Raises CheckpointError naming the file if it is missing or broken."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a Hugging Face checkpoint directory is needed") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value
