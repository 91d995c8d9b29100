"""Building blocks whose every output row depends on its own input row only, bit for bit, however many rows there are.

Shape suffixes: T tokens (rows), I inputs, O outputs, H hidden size, F feed-forward width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

#: fp32 matrix products pick their kernel by the number of rows; from 16 on, in multiples of 16, a row's value stays the
#: same whatever the number and whatever the number of threads. bf16 products need no padding.
ROW_MULTIPLE = 16


def row_multiple(dtype: torch.dtype) -> int:
    """To a multiple of how many rows a matrix product in `dtype` must be padded."""
    return ROW_MULTIPLE if dtype == torch.float32 else 1


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, [T, O]; a row's result does not depend on the other rows."""
    num_rows = x_TI.shape[0]
    padding = -num_rows % row_multiple(x_TI.dtype)
    if not padding:
        return F.linear(x_TI, weight_OI, bias_O)
    return F.linear(F.pad(x_TI, (0, 0, 0, padding)), weight_OI, bias_O)[:num_rows]


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)


def silu_gated(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of fused [T, 2 F] halves, [T, F]; computed in fp32, rounded once.

    Written out, because the library's fp32 silu differs in the last bit between its vector loop and its scalar tail, so
    that an element's value would depend on where in the batch it stands.
    """
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up_TF.dtype)


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """The feed-forward block of a dense layer."""

    #: [2 F, H]: gate rows, then up rows.
    gate_up: torch.Tensor
    #: [H, F]
    down: torch.Tensor

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return linear(silu_gated(linear(x_TH, self.gate_up)), self.down)
