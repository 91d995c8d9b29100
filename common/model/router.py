"""Routers of MoE layers: which experts a token goes through, and how much each counts.

Shape suffixes: T tokens, H hidden size, E experts, K experts per token, J groups of experts.
"""

from dataclasses import dataclass

import torch

from common.model.config import RouterConfig
from common.model.layers import linear, sigmoid
from common.routing.capture import LayerRows


@dataclass(frozen=True, slots=True)
class TorchRouter:
    """Top-k router, see `common.model.kernels.interface`."""

    config: RouterConfig
    top_k: int
    #: [E, H], in fp32 if the config says so.
    weight: torch.Tensor
    #: [E], as the weight; None where there is none.
    bias_E: torch.Tensor | None = None
    #: fp32; None where there is none.
    correction_E: torch.Tensor | None = None

    def choose(self, x_TH: torch.Tensor, rows: LayerRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and fp32 weights, both [T, K], by descending selection score, ties by the lower id.

        The sort is stable and covers all experts, because `topk` leaves the order of ties open.
        """
        logits_TE = linear(x_TH.to(self.weight.dtype), self.weight, self.bias_E).float()
        scores_TE = self._scores(logits_TE)
        ranking_TE = scores_TE if self.correction_E is None else scores_TE + self.correction_E
        ranking_TE = self._within_best_groups(ranking_TE)
        ids_TK = torch.sort(ranking_TE, dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        if rows is not None:
            rows.write(ids_TK)
        return ids_TK, self._weights(scores_TE.gather(1, ids_TK))

    def _scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        match self.config.scoring:
            case "softmax":
                return torch.softmax(logits_TE, dim=-1)
            case "sigmoid":
                return sigmoid(logits_TE)
            case "chosen_softmax":
                return logits_TE

    def _within_best_groups(self, ranking_TE: torch.Tensor) -> torch.Tensor:
        """The ranking, with every expert outside the best groups ranked last; of equal groups the lower goes first."""
        if self.config.num_groups_kept == self.config.num_groups:
            return ranking_TE
        grouped_TJE = ranking_TE.view(len(ranking_TE), self.config.num_groups, -1)
        best_TJE = torch.sort(grouped_TJE, dim=-1, descending=True).values
        scores_TJ = best_TJE[..., 0]
        for place in range(1, self.config.num_group_scores):
            scores_TJ = scores_TJ + best_TJE[..., place]
        order_TJ = torch.sort(scores_TJ, dim=-1, descending=True, stable=True).indices
        dropped_TJ = torch.ones_like(scores_TJ, dtype=torch.bool)
        dropped_TJ.scatter_(1, order_TJ[:, : self.config.num_groups_kept], False)
        return grouped_TJE.masked_fill(dropped_TJ.unsqueeze(-1), float("-inf")).view(ranking_TE.shape)

    def _weights(self, scores_TK: torch.Tensor) -> torch.Tensor:
        if self.config.scoring == "chosen_softmax":
            scores_TK = torch.softmax(scores_TK, dim=-1)
        if self.config.normalize:
            scores_TK = scores_TK / (scores_TK.sum(dim=-1, keepdim=True) + self.config.normalize_eps)
        return scores_TK * self.config.scale if self.config.scale != 1 else scores_TK
