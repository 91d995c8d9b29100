"""Collects the router's choices during one forward pass. Shape suffixes: T tokens, L layers, K experts per token."""

import torch

from common.routing.record import RoutingArray, RoutingLayout


class RoutingCapture:
    """Expert ids of one forward pass, kept on the device until the pass is over (one copy, no sync per layer).

    Layers that never call `record` (dense layers) hold zeros.
    """

    def __init__(self, layout: RoutingLayout, num_tokens: int, device: torch.device) -> None:
        self._layout = layout
        self._ids_LTK = torch.zeros((layout.num_layers, num_tokens, layout.top_k), dtype=torch.int32, device=device)

    def record(self, layer: int, expert_ids_TK: torch.Tensor) -> None:
        """Keeps one MoE layer's ids, ordered by descending selection score, ties by lower id."""
        self._ids_LTK[layer] = expert_ids_TK

    def take(self) -> RoutingArray:
        """All ids as a C-order [T, L, K] array in the model's routing dtype."""
        rows_TLK = self._ids_LTK.transpose(0, 1).cpu().numpy()
        return rows_TLK.astype(self._layout.dtype, order="C")
