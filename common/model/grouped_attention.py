"""Grouped-query attention with rotary positions (Ainslie et al., arXiv 2305.13245), in every variety of the families.

Shape suffixes: T tokens, H hidden size, N query heads, G KV heads, D head size, S slots, C planes of the cache.
"""

from dataclasses import dataclass

import torch

from common.model.kernels.interface import Heads, Linear
from common.model.plan import ForwardPlan
from common.model.rope import Angles


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """The attention block of one layer; Q, K and V come from one fused product."""

    #: To (N + 2 G) D outputs: query heads, then key heads, then value heads.
    qkv: Linear
    heads: Heads
    #: From N D inputs.
    out: Linear
    #: Keys seen by a query, itself included; None: all.
    window: int | None = None
    #: fp32 [N]; None for families without attention sinks.
    sinks: torch.Tensor | None = None

    def forward(self, x_TH: torch.Tensor, angles: Angles, plan: ForwardPlan, kv_CSGD: torch.Tensor) -> torch.Tensor:
        """Writes K and V of these tokens into `kv_CSGD`, one layer of the store, and attends; [T, H]."""
        q_TND = self.heads.split(self.qkv(x_TH), angles, plan.slots_T, kv_CSGD)
        output_TND = plan.attention.attend(q_TND, kv_CSGD, window=self.window, sinks_N=self.sinks)
        return self.out(output_TND.flatten(1))
