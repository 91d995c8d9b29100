"""Feed-forward blocks of a layer. Shape suffixes: T tokens, H hidden size, K experts per token."""

from dataclasses import dataclass

import torch

from common.model.kernels.interface import Experts, Linear, Router
from common.model.layers import linear, sigmoid
from common.routing.capture import LayerRows


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """The block of a dense layer, which has nothing to record."""

    network: Linear

    def forward(self, x_TH: torch.Tensor, rows: LayerRows | None) -> torch.Tensor:
        """[T, H]"""
        return self.network(x_TH)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The network that every token goes through beside its experts."""

    network: Linear
    #: [1, H]; None: its output counts in full.
    gate_1H: torch.Tensor | None = None

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        y_TH = self.network(x_TH)
        if self.gate_1H is None:
            return y_TH
        return (sigmoid(linear(x_TH, self.gate_1H).float()) * y_TH).to(x_TH.dtype)


@dataclass(frozen=True, slots=True)
class MoeFeedForward:
    """The block of an MoE layer: its router chooses, and what it chose is recorded where it is applied."""

    router: Router
    experts: Experts
    shared: SharedExpert | None = None

    def forward(self, x_TH: torch.Tensor, rows: LayerRows | None) -> torch.Tensor:
        """[T, H]; writes the choice into `rows`, if somebody wants it."""
        y_TH = self.experts(x_TH, *self.router.choose(x_TH, rows))
        return y_TH if self.shared is None else y_TH + self.shared.forward(x_TH)
