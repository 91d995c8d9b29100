"""The decoder: embedding, layers of attention and feed-forward, final norm and head.

Shape suffixes: T tokens, H hidden size, G KV heads, C planes of the cache, D size of a cached vector, V vocabulary,
S slots, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from common.model.attention import QueryGroup
from common.model.config import ModelConfig
from common.model.layers import GatedFeedForward, linear, rms_norm
from common.model.moe import MoeFeedForward
from common.model.plan import ForwardPlan
from common.model.rope import CosSin, RotaryTable
from common.routing.capture import RoutingCapture


class Attention(Protocol):
    """The attention block of one layer."""

    def forward(
        self, x_TH: torch.Tensor, cos_sin: CosSin, slots_T: torch.Tensor, groups: Sequence[QueryGroup], kv: torch.Tensor
    ) -> torch.Tensor:
        """Writes what is cached of these tokens into `kv`, one layer of the store [C, S, G, D], and attends; [T, H]."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One transformer layer, dense or MoE."""

    input_norm: torch.Tensor
    attention: Attention
    feed_forward_norm: torch.Tensor
    feed_forward: GatedFeedForward | MoeFeedForward


class MoeDecoder:
    """A whole model: weights and arithmetic, no cache of its own. Everything runs under `torch.inference_mode`.

    Sequences have at most `max_positions` tokens, by default as many as the checkpoint was trained for.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding_VH: torch.Tensor,
        layers: Sequence[DecoderLayer],
        final_norm_H: torch.Tensor,
        lm_head_VH: torch.Tensor,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.device = embedding_VH.device
        self.dtype = embedding_VH.dtype
        self._embedding_VH = embedding_VH
        self._layers = tuple(layers)
        self._final_norm_H = final_norm_H
        self._lm_head_VH = lm_head_VH
        self.max_positions = config.max_position_embeddings if max_positions is None else max_positions
        self._rotary = RotaryTable(config.rope, config.attention.rotary_dim, self.device, self.max_positions)

    def forward(self, plan: ForwardPlan, kv_LCSGD: torch.Tensor, capture: RoutingCapture | None) -> torch.Tensor:
        """Last hidden states [T, H]; writes K and V of every token, and its routing if `capture` is given."""
        cos_sin = self._rotary.look_up(plan.positions_T)
        x_TH = F.embedding(plan.token_ids_T, self._embedding_VH)
        for index, layer in enumerate(self._layers):
            normed_TH = rms_norm(x_TH, layer.input_norm, self.config.rms_norm_eps)
            groups = plan.groups[self.config.sliding_windows[index]]
            x_TH = x_TH + layer.attention.forward(normed_TH, cos_sin, plan.slots_T, groups, kv_LCSGD[index])
            normed_TH = rms_norm(x_TH, layer.feed_forward_norm, self.config.rms_norm_eps)
            x_TH = x_TH + self._feed_forward(index, layer, normed_TH, capture)
        return x_TH

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 [T, V] from last hidden states."""
        return linear(rms_norm(x_TH, self._final_norm_H, self.config.rms_norm_eps), self._lm_head_VH).float()

    def _feed_forward(
        self, index: int, layer: DecoderLayer, x_TH: torch.Tensor, capture: RoutingCapture | None
    ) -> torch.Tensor:
        block = layer.feed_forward
        if isinstance(block, GatedFeedForward):
            return block.forward(x_TH)
        ids_TK, weights_TK = block.router.choose(x_TH)
        if capture is not None:
            capture.record(index, ids_TK)
        return block.forward(x_TH, ids_TK, weights_TK)
