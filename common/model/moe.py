"""The experts of a mixture-of-experts block in plain torch: dispatch, compute, combine.

Shape suffixes: T tokens, H hidden size, E experts, K experts per token, F expert width, R = T × K rows
ordered by expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from common.model.layers import linear, silu_gated

#: Fused gate and up outputs [R, 2 F] to [R, F].
Activation = Callable[[torch.Tensor], torch.Tensor]


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
class TorchExperts:
    """All experts of a layer, see `common.model.kernels.interface`."""

    #: [2 F, H] each: gate rows, then up rows; and their biases, [E, 2 F].
    gate_up: Sequence[torch.Tensor]
    #: [H, F] each; and their biases, [E, H].
    down: Sequence[torch.Tensor]
    activate: Activation = silu_gated
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def __call__(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        dispatch = Dispatch.plan(ids_TK, len(self.gate_up))
        y_RH = self.forward(dispatch.scatter(x_TH), dispatch.counts)
        return combine(dispatch.gather(y_RH), weights_TK).to(x_TH.dtype)

    def forward(self, x_RH: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Applies each expert to its `counts` consecutive rows, [R, H]."""
        gate_up_RF = grouped_linear(x_RH, self.gate_up, self.gate_up_bias, counts)
        return grouped_linear(self.activate(gate_up_RF), self.down, self.down_bias, counts)


def combine(y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Weighted sum over K, [T, H], in the fp32 of the weights: the same additions in top-k order for every batch."""
    total_TH = y_TKH[:, 0] * weights_TK[:, :1]
    for k in range(1, y_TKH.shape[1]):
        total_TH += y_TKH[:, k] * weights_TK[:, k : k + 1]
    return total_TH


def grouped_linear(
    x_RI: torch.Tensor, weights_OI: Sequence[torch.Tensor], bias_EO: torch.Tensor | None, counts: list[int]
) -> torch.Tensor:
    """Each expert's rows times its weight, transposed, plus its bias; [R, O]. Experts without rows cost nothing."""
    parts = torch.split(x_RI, counts)
    used = [expert for expert, part in enumerate(parts) if len(part)]
    biases = {expert: None if bias_EO is None else bias_EO[expert] for expert in used}
    return torch.cat([linear(parts[expert], weights_OI[expert], biases[expert]) for expert in used])
