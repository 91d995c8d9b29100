"""The mixture-of-experts block in its four steps: route, dispatch, compute, combine.

Shape suffixes: T tokens, H hidden size, E experts, K experts per token, F expert width, R = T × K rows
ordered by expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.model.layers import linear, silu_gated


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax top-k router; returns its choice, so that recording it is one line where it is called."""

    #: [E, H]
    weight: torch.Tensor
    top_k: int
    norm_topk_prob: bool

    def choose(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and fp32 weights, both [T, K], by descending probability, ties by the lower id.

        The sort is stable and covers all experts, because `topk` leaves the order of ties open.
        """
        scores_TE = torch.softmax(linear(x_TH, self.weight).float(), dim=-1)
        sorted_TE, ids_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
        weights_TK = sorted_TE[:, : self.top_k]
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return ids_TE[:, : self.top_k], weights_TK


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Orders the (token, choice) pairs of a batch by expert, so that each expert computes its rows at once."""

    #: Pair `order[r]` (its token is `order[r] // K`) stands in row r; [T K].
    order: torch.Tensor
    #: Number of rows of each expert, by id.
    counts: list[int]
    top_k: int

    @classmethod
    def plan(cls, ids_TK: torch.Tensor, num_experts: int) -> "Dispatch":
        ids = ids_TK.reshape(-1)
        counts = torch.bincount(ids, minlength=num_experts).tolist()
        return cls(torch.argsort(ids, stable=True), counts, ids_TK.shape[1])

    def scatter(self, x_TH: torch.Tensor) -> torch.Tensor:
        """One row per pair, in expert order, [R, H]."""
        return x_TH.index_select(0, self.order // self.top_k)

    def gather(self, y_RH: torch.Tensor) -> torch.Tensor:
        """Brings the experts' outputs back to [T, K, H]."""
        row_of_pair = torch.empty_like(self.order)
        row_of_pair[self.order] = torch.arange(len(self.order), device=self.order.device)
        return y_RH.index_select(0, row_of_pair).view(-1, self.top_k, y_RH.shape[1])


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of all experts of a layer, by id."""

    #: [2 F, H] each: gate rows, then up rows.
    gate_up: Sequence[torch.Tensor]
    #: [H, F] each.
    down: Sequence[torch.Tensor]

    def forward(self, x_RH: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Applies each expert to its `counts` consecutive rows, [R, H]."""
        return _grouped_linear(silu_gated(_grouped_linear(x_RH, self.gate_up, counts)), self.down, counts)


@dataclass(frozen=True, slots=True)
class MoeFeedForward:
    """The feed-forward block of an MoE layer, after its router has chosen."""

    router: Router
    experts: Experts

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        dispatch = Dispatch.plan(ids_TK, len(self.experts.gate_up))
        y_RH = self.experts.forward(dispatch.scatter(x_TH), dispatch.counts)
        return combine(dispatch.gather(y_RH), weights_TK).to(x_TH.dtype)


def combine(y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum over K, [T, H], in the fp32 of the weights: the same additions in top-k order for every batch."""
    total_TH = y_TKH[:, 0] * weights_TK[:, :1]
    for k in range(1, y_TKH.shape[1]):
        total_TH += y_TKH[:, k] * weights_TK[:, k : k + 1]
    return total_TH


def _grouped_linear(x_RI: torch.Tensor, weights_OI: Sequence[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Each expert's rows times its weight, transposed; [R, O]. Experts without rows cost nothing."""
    parts = torch.split(x_RI, counts)
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weights_OI, strict=True) if len(part)])
