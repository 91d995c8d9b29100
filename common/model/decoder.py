"""The decoder: embedding, layers of attention and feed-forward, final norm and head.

Shape suffixes: T tokens, H hidden size, N query heads, G KV heads, D head size, V vocabulary, S slots, L layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.model.attention import QueryGroup
from common.model.config import ModelConfig
from common.model.layers import GatedFeedForward, linear, rms_norm
from common.model.moe import MoeFeedForward
from common.model.plan import ForwardPlan
from common.model.rope import RotaryTable, rotate
from common.routing.capture import RoutingCapture

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary positions; Q, K and V come from one fused product."""

    #: [(N + 2 G) D, H]: query rows, then key rows, then value rows; and its bias.
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    #: [H, N D], and its bias.
    out: torch.Tensor
    out_bias: torch.Tensor | None
    #: fp32 [N + G, D]: norm weights of query and key heads; None for families without QK norm.
    qk_norm: torch.Tensor | None
    num_kv_heads: int
    head_dim: int
    eps: float

    def forward(
        self, x_TH: torch.Tensor, cos_sin: CosSin, slots_T: torch.Tensor, groups: Sequence[QueryGroup], kv: torch.Tensor
    ) -> torch.Tensor:
        """Writes K and V of these tokens into `kv`, one layer of the store [2, S, G, D], and attends; [T, H]."""
        q_TND, k_TGD, v_TGD = self._project(x_TH, cos_sin)
        kv[0].index_copy_(0, slots_T, k_TGD)
        kv[1].index_copy_(0, slots_T, v_TGD)
        cache = kv.view(-1, self.head_dim)
        attended = [group.attend(q_TND[group.tokens], cache, self.num_kv_heads) for group in groups]
        output_TND = attended[0] if len(attended) == 1 else torch.cat(attended)
        return linear(output_TND.flatten(1), self.out, self.out_bias)

    def _project(self, x_TH: torch.Tensor, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled queries, keys and values; norm, rotation and scale are computed in fp32 and rounded once."""
        heads = linear(x_TH, self.qkv, self.qkv_bias).view(len(x_TH), -1, self.head_dim)
        num_qk_heads = heads.shape[1] - self.num_kv_heads
        qk, v_TGD = heads[:, :num_qk_heads].float(), heads[:, num_qk_heads:]
        if self.qk_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), None, self.eps) * self.qk_norm
        qk = rotate(qk, *cos_sin)
        q_TND = qk[:, : -self.num_kv_heads] * self.head_dim**-0.5
        return q_TND.to(x_TH.dtype), qk[:, -self.num_kv_heads :].to(x_TH.dtype), v_TGD


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One transformer layer, dense or MoE."""

    input_norm: torch.Tensor
    attention: Attention
    feed_forward_norm: torch.Tensor
    feed_forward: GatedFeedForward | MoeFeedForward


class MoeDecoder:
    """A whole model: weights and arithmetic, no cache of its own. Everything runs under `torch.inference_mode`.

    Sequences have at most `max_positions` tokens, by default as many as the checkpoint allows.
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
        limit = config.max_position_embeddings
        self._rotary = RotaryTable(config, self.device, limit if max_positions is None else min(limit, max_positions))

    def forward(self, plan: ForwardPlan, kv_L2SGD: torch.Tensor, capture: RoutingCapture | None) -> torch.Tensor:
        """Last hidden states [T, H]; writes K and V of every token, and its routing if `capture` is given."""
        cos_sin = self._rotary.look_up(plan.positions_T)
        x_TH = F.embedding(plan.token_ids_T, self._embedding_VH)
        for index, layer in enumerate(self._layers):
            normed_TH = rms_norm(x_TH, layer.input_norm, self.config.rms_norm_eps)
            groups = plan.groups[self.config.sliding_windows[index]]
            x_TH = x_TH + layer.attention.forward(normed_TH, cos_sin, plan.slots_T, groups, kv_L2SGD[index])
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
