"""Collects the router's choices during one forward pass. Shape suffixes: T tokens, L layers, K experts per token."""

from dataclasses import dataclass

import torch

from common.routing.record import RoutingArray, RoutingLayout

#: torch's type of as many bytes; the bits are what counts, and the array that comes out is unsigned again.
_TORCH_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class LayerRows:
    """One layer's place in the rows of a batch."""

    ids_TK: torch.Tensor

    def write(self, expert_ids_TK: torch.Tensor) -> None:
        """Keeps one MoE layer's ids, ordered by descending selection score, ties by lower id."""
        self.ids_TK.copy_(expert_ids_TK)

    @property
    def address(self) -> int:
        """Of the first token's ids, for kernels that write them there themselves; K ids follow each other."""
        return self.ids_TK.data_ptr()

    @property
    def row_bytes(self) -> int:
        """Distance from one token's ids to the next one's."""
        return self.ids_TK.stride(0) * self.ids_TK.itemsize

    @property
    def layer_bytes(self) -> int:
        """Distance from one layer's ids to the next one's of the same token."""
        return self.ids_TK.shape[1] * self.ids_TK.itemsize

    @property
    def id_bytes(self) -> int:
        return self.ids_TK.itemsize


class RoutingCapture:
    """Expert ids of one forward pass, in the form of the rows, kept on the device until the pass is over.

    Layers that nobody writes (dense layers) hold zeros.
    """

    def __init__(self, layout: RoutingLayout, num_tokens: int, device: torch.device) -> None:
        self._layout = layout
        shape = (num_tokens, layout.num_layers, layout.top_k)
        self._ids_TLK = torch.zeros(shape, dtype=_TORCH_TYPES[layout.dtype.itemsize], device=device)

    def layer(self, index: int) -> LayerRows:
        """Where layer `index` writes its ids."""
        return LayerRows(self._ids_TLK[:, index])

    def take(self) -> RoutingArray:
        """All ids as a C-order [T, L, K] array in the model's routing dtype."""
        rows_TLK: RoutingArray = self._ids_TLK.cpu().numpy().view(self._layout.dtype)
        return rows_TLK
