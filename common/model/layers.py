"""Building blocks whose every output row depends on its own input row only, bit for bit, however many rows there are.

Shape suffixes: T tokens (rows), I inputs, O outputs, H hidden size, F feed-forward width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.model.blas import fix_summation_order
from common.model.packed import pack, packed_product

fix_summation_order()

#: fp32 matrix products pick their kernel by the number of rows, split columns over threads and compute leftover columns
#: in another order. With rows and columns in multiples of 16 every row came out the same for 1 to 528 rows and 1 to 16
#: threads; without, many did not.
FP32_MULTIPLE = 16

#: bf16 products no larger than this (rows × inputs × outputs) take another kernel than all larger ones, which showed
#: in about one row of a thousand.
_BF16_SMALL_PRODUCT = 16**3

#: bf16 products of one row with more inputs than this add them in another order than products of two or more rows do,
#: which showed in about one element of a thousand.
_BF16_LONGEST_SINGLE_ROW = 1024


def prepare_weight(weight_OI: torch.Tensor) -> torch.Tensor:
    """A weight as `linear` reads it fastest. Small ones stay plain: their padding suits the plain kernel."""
    return pack(weight_OI, min_size=_BF16_SMALL_PRODUCT + 1)


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, [T, O]; a row's result does not depend on the other rows.

    In bf16 the product is rounded, then the bias added and the sum rounded again: a kernel that adds the bias itself
    rounds once, and would have to prove anew that its rows are independent.

    Args:
        weight_OI: plain, or from `prepare_weight`.
    """
    num_rows = len(x_TI)
    x_TI = _pad_rows(x_TI, _num_safe_rows(num_rows, weight_OI))
    y_TO = packed_product(x_TI, weight_OI) if weight_OI.is_mkldnn else _plain_product(x_TI, weight_OI)
    y_TO = y_TO if len(y_TO) == num_rows else y_TO[:num_rows]
    return y_TO if bias_O is None else y_TO + bias_O


def _plain_product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    num_outputs = len(weight_OI)
    if weight_OI.dtype == torch.float32:
        weight_OI = _pad_rows(weight_OI, _round_up(num_outputs))
    return F.linear(x_TI, weight_OI)[:, :num_outputs]


def batched_product(a_XRI: torch.Tensor, b_XIO: torch.Tensor) -> torch.Tensor:
    """`a @ b` for each of X pairs, [X, R, O]; a result depends neither on X nor on R, a multiple of FP32_MULTIPLE."""
    num_outputs = b_XIO.shape[-1]
    if b_XIO.dtype == torch.float32 and num_outputs % FP32_MULTIPLE:
        b_XIO = F.pad(b_XIO, (0, -num_outputs % FP32_MULTIPLE))
    return torch.bmm(a_XRI, b_XIO)[..., :num_outputs]


def per_head_product(x_TNI: torch.Tensor, weight_NIO: torch.Tensor) -> torch.Tensor:
    """Each head's rows times its own matrix, [T, N, O]; a row's result does not depend on T."""
    num_rows, num_heads, num_inputs = x_TNI.shape
    # Beyond the size up to which other kernels compute, for every number of heads.
    num_safe = _round_up(max(num_rows, _BF16_SMALL_PRODUCT // weight_NIO[0].numel() + 1))
    # Always a tensor of its own, because strides too decide which kernel computes.
    x_NRI = x_TNI.new_zeros(num_heads, num_safe, num_inputs)
    x_NRI[:, :num_rows] = x_TNI.transpose(0, 1)
    return batched_product(x_NRI, weight_NIO)[:, :num_rows].transpose(0, 1)


def _num_safe_rows(num_rows: int, weight_OI: torch.Tensor) -> int:
    if weight_OI.dtype == torch.float32:
        return _round_up(num_rows)
    num_outputs, num_inputs = weight_OI.shape
    fewest = _BF16_SMALL_PRODUCT // (num_outputs * num_inputs) + 1
    return max(num_rows, fewest, 2 if num_inputs > _BF16_LONGEST_SINGLE_ROW else 1)


def _round_up(count: int) -> int:
    return -(-count // FP32_MULTIPLE) * FP32_MULTIPLE


def _pad_rows(x_TI: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Appends rows of zeros; costs nothing where there are enough rows already, as in models of real size."""
    return F.pad(x_TI, (0, 0, 0, num_rows - len(x_TI))) if num_rows > len(x_TI) else x_TI


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)


def silu_gated(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of fused [T, 2 F] halves, [T, F]; computed in fp32, rounded once.

    Written out, because the library's fp32 silu differs in the last bit between its vector loop and its scalar tail, so
    that an element's value would depend on where in the batch it stands.
    """
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    return (gate / gate.neg().exp_().add_(1)).mul_(up).to(gate_up_TF.dtype)


def clamped_swiglu(gate_up_TF: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + 1)` of fused [T, 2 F] halves, [T, F], both clamped to `limit`: gpt-oss.

    The gate has no lower bound. Computed in fp32, rounded once; written out as in `silu_gated`.
    """
    gate, up = gate_up_TF.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate / (-alpha * gate).exp_().add_(1)).mul_(up.add_(1)).to(gate_up_TF.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """fp32 logistic function, written out for the reason given in `silu_gated`."""
    return x.neg().exp_().add_(1).reciprocal_()


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    """The feed-forward block of a dense layer."""

    #: [2 F, H]: gate rows, then up rows.
    gate_up: torch.Tensor
    #: [H, F]
    down: torch.Tensor

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, H]"""
        return linear(silu_gated(linear(x_TH, self.gate_up)), self.down)
