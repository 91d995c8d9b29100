"""The mixture-of-experts block in its four steps: route, dispatch, compute, combine.

Shape suffixes: T tokens, H hidden size, E experts, K experts per token, F expert width, R rows of the dispatch buffer.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.model.layers import linear, row_multiple, silu_gated


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
    """Where the row of each (token, choice) pair stands in a buffer ordered by expert.

    Every expert's group of rows is padded to a multiple of what matrix products need to be independent of their number
    of rows.
    """

    #: Rows of the buffer, in expert order of the pairs: pair `order[i]` stands in row `rows[i]`.
    order: torch.Tensor
    rows: torch.Tensor
    #: End of each expert's group, [E].
    ends_E: torch.Tensor
    top_k: int

    @classmethod
    def plan(cls, ids_TK: torch.Tensor, num_experts: int, multiple: int) -> "Dispatch":
        ids = ids_TK.reshape(-1)
        sorted_ids, order = torch.sort(ids, stable=True)
        counts_E = torch.bincount(ids, minlength=num_experts)
        rows = torch.arange(len(ids), device=ids.device)
        if multiple == 1:
            return cls(order, rows, counts_E.cumsum(0), ids_TK.shape[1])
        padding_E = -counts_E % multiple
        padding_before_E = padding_E.cumsum(0) - padding_E
        return cls(order, rows + padding_before_E[sorted_ids], (counts_E + padding_E).cumsum(0), ids_TK.shape[1])

    def scatter(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Copies each token's row to its experts' groups, [R, H]; padding rows are zero."""
        x_PH = x_TH.index_select(0, self.order // self.top_k)
        num_rows = int(self.ends_E[-1])
        if num_rows == len(x_PH):
            return x_PH
        return x_PH.new_zeros(num_rows, x_PH.shape[1]).index_copy_(0, self.rows, x_PH)

    def gather(self, y_RH: torch.Tensor) -> torch.Tensor:
        """Brings the experts' outputs back to [T, K, H]."""
        row_of_pair = torch.empty_like(self.rows)
        row_of_pair[self.order] = self.rows
        return y_RH.index_select(0, row_of_pair).view(-1, self.top_k, y_RH.shape[1])


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of all experts of a layer, stacked."""

    #: [E, 2 F, H]: gate rows, then up rows.
    gate_up: torch.Tensor
    #: [E, H, F]
    down: torch.Tensor

    def forward(self, x_RH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Applies expert e to rows [ends[e - 1], ends[e])."""
        return _grouped_linear(silu_gated(_grouped_linear(x_RH, self.gate_up, ends_E)), self.down, ends_E)


@dataclass(frozen=True, slots=True)
class MoeFeedForward:
    """The feed-forward block of an MoE layer, after its router has chosen."""

    router: Router
    experts: Experts

    def forward(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        dispatch = Dispatch.plan(ids_TK, len(self.experts.gate_up), row_multiple(x_TH.dtype))
        y_RH = self.experts.forward(dispatch.scatter(x_TH), dispatch.ends_E)
        return combine(dispatch.gather(y_RH), weights_TK).to(x_TH.dtype)


def combine(y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """fp32 weighted sum over K, added in top-k order: the same additions in the same order for every batch."""
    weighted_TKH = y_TKH.float() * weights_TK.unsqueeze(-1)
    total_TH = weighted_TKH[:, 0]
    for k in range(1, weighted_TKH.shape[1]):
        total_TH = total_TH + weighted_TKH[:, k]
    return total_TH


def _grouped_linear(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Row r of expert e's group times that expert's weight, transposed; [R, O]."""
    if _has_grouped_kernel(x_RI):
        return F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E.to(torch.int32))
    y_RO = x_RI.new_empty(len(x_RI), weight_EOI.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            y_RO[start:end] = F.linear(x_RI[start:end], weight_EOI[expert])
        start = end
    return y_RO


def _has_grouped_kernel(x_RI: torch.Tensor) -> bool:
    """The grouped kernel equals one product per expert bit for bit in bf16 only, and wants 16-byte strides."""
    return x_RI.dtype == torch.bfloat16 and x_RI.shape[1] % 8 == 0
