"""The decoder: embedding, layers of attention and feed-forward, final norm and head.

Shape suffixes: T tokens, H hidden size, G KV heads, C planes of the cache, D size of a cached vector, V vocabulary,
S slots, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from common.model.config import ModelConfig
from common.model.feed_forward import DenseFeedForward, MoeFeedForward
from common.model.kernels.interface import Kernels, Linear
from common.model.plan import ForwardPlan
from common.model.rope import Angles, RotaryTable
from common.routing.capture import RoutingCapture


class Attention(Protocol):
    """The attention block of one layer."""

    def forward(self, x_TH: torch.Tensor, angles: Angles, plan: ForwardPlan, kv: torch.Tensor) -> torch.Tensor:
        """Writes what is cached of these tokens into `kv`, one layer of the store [C, S, G, D], and attends; [T, H]."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One transformer layer, dense or MoE."""

    input_norm: torch.Tensor
    attention: Attention
    feed_forward_norm: torch.Tensor
    feed_forward: DenseFeedForward | MoeFeedForward


class MoeDecoder:
    """A whole model: weights and arithmetic, no cache of its own. Everything runs under `torch.inference_mode`.

    Sequences have at most `max_positions` tokens, by default as many as the checkpoint was trained for.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        embedding_VH: torch.Tensor,
        layers: Sequence[DecoderLayer],
        final_norm_H: torch.Tensor,
        lm_head: Linear,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.device = embedding_VH.device
        self.dtype = embedding_VH.dtype
        self._embedding_VH = embedding_VH
        self._layers = tuple(layers)
        self._stack = kernels.stack(layers, config.rms_norm_eps)
        self._final_norm_H = final_norm_H
        self._lm_head = lm_head
        self.max_positions = config.max_position_embeddings if max_positions is None else max_positions
        self._rotary = RotaryTable(config.rope, config.attention.rotary_dim, self.device, self.max_positions)

    def forward(self, plan: ForwardPlan, kv_LCSGD: torch.Tensor, capture: RoutingCapture | None) -> torch.Tensor:
        """Last hidden states [T, H]; writes K and V of every token, and its routing if `capture` is given."""
        angles = Angles(self._rotary, plan.positions_T)
        x_TH = F.embedding(plan.token_ids_T, self._embedding_VH)
        if self._stack is not None:
            return self._stack.forward(x_TH, angles, plan, kv_LCSGD, capture)
        add_norm, eps = self.kernels.add_norm, self.config.rms_norm_eps
        delta_TH = None
        for index, layer in enumerate(self._layers):
            normed_TH = add_norm(x_TH, delta_TH, layer.input_norm, eps)
            delta_TH = layer.attention.forward(normed_TH, angles, plan, kv_LCSGD[index])
            normed_TH = add_norm(x_TH, delta_TH, layer.feed_forward_norm, eps)
            delta_TH = layer.feed_forward.forward(normed_TH, None if capture is None else capture.layer(index))
        return x_TH if delta_TH is None else x_TH + delta_TH

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """fp32 [T, V] from last hidden states."""
        normed_TH = self.kernels.add_norm(x_TH, None, self._final_norm_H, self.config.rms_norm_eps)
        return self._lm_head(normed_TH).float()
