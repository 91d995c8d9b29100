"""Grouped-query attention with rotary positions (Ainslie et al., arXiv 2305.13245), in every variety of the families.

Shape suffixes: T tokens, H hidden size, N query heads, G KV heads, D head size, S slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.model.attention import QueryGroup
from common.model.config import GroupedAttention
from common.model.layers import linear
from common.model.rope import CosSin, rotate


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """The attention block of one layer; Q, K and V come from one fused product."""

    config: GroupedAttention
    #: [(N + 2 G) D, H]: query rows, then key rows, then value rows; and its bias.
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    #: [H, N D], and its bias.
    out: torch.Tensor
    out_bias: torch.Tensor | None
    #: fp32 [N + G, D]: norm weights of query and key heads; None for families without QK norm.
    qk_norm: torch.Tensor | None
    eps: float
    #: fp32 [N]; None for families without attention sinks.
    sinks: torch.Tensor | None = None

    def forward(
        self, x_TH: torch.Tensor, cos_sin: CosSin, slots_T: torch.Tensor, groups: Sequence[QueryGroup], kv: torch.Tensor
    ) -> torch.Tensor:
        """Writes K and V of these tokens into `kv`, one layer of the store [2, S, G, D], and attends; [T, H]."""
        q_TND, k_TGD, v_TGD = self._project(x_TH, cos_sin)
        kv[0].index_copy_(0, slots_T, k_TGD)
        kv[1].index_copy_(0, slots_T, v_TGD)
        cache = kv.view(-1, self.config.head_dim)
        num_kv_heads = self.config.num_kv_heads
        attended = [group.attend(q_TND[group.tokens], cache, num_kv_heads, sinks_N=self.sinks) for group in groups]
        output_TND = attended[0] if len(attended) == 1 else torch.cat(attended)
        return linear(output_TND.flatten(1), self.out, self.out_bias)

    def _project(self, x_TH: torch.Tensor, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled queries, keys and values; norm, rotation and scale are computed in fp32 and rounded once."""
        heads = linear(x_TH, self.qkv, self.qkv_bias).view(len(x_TH), -1, self.config.head_dim)
        qk, v_TGD = heads[:, : -self.config.num_kv_heads].float(), heads[:, -self.config.num_kv_heads :]
        if self.qk_norm is not None:
            qk = self._normed(qk) * self.qk_norm
        if (bound := self.config.clip_qkv) is not None:
            qk, v_TGD = qk.clamp(-bound, bound), v_TGD.clamp(-bound, bound)
        qk = rotate(qk, *cos_sin)
        q_TND = qk[:, : self.config.num_heads] * self.config.head_dim**-0.5
        return q_TND.to(x_TH.dtype), qk[:, self.config.num_heads :].to(x_TH.dtype), v_TGD

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """Query and key heads over their root mean square: each head's own, or that of all heads of its kind."""
        if self.config.qk_norm == "head":
            return F.rms_norm(qk, (self.config.head_dim,), None, self.eps)
        parts = qk[:, : self.config.num_heads], qk[:, self.config.num_heads :]
        return torch.cat([F.rms_norm(part, part.shape[1:], None, self.eps) for part in parts], dim=1)
