"""Weights in the layout that their kernel reads, so that no product rearranges them first.

A plain bf16 weight is packed anew in each product: for the few rows of a decode step that takes longer than the
arithmetic. The packed kernel computed the same bits as the plain one wherever both were tried. oneDNN offers this
to torch's own compiler; the operators carry an underscore, and torch is pinned below the next major version.

Shape suffixes: T tokens (rows), I inputs, O outputs.
"""

import torch

#: The layout is the same for every number of rows, as far as the operator can tell.
_ROWS_HINT = 1


def pack(weight_OI: torch.Tensor, *, min_size: int = 0) -> torch.Tensor:
    """The weight packed, which only `packed_product` can read; as it was where the device, the dtype or a size below
    `min_size` elements does not call for it.
    """
    if weight_OI.numel() < min_size or not _has_packed_kernel(weight_OI):
        return weight_OI
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS_HINT)
    return packed


def packed_product(x_TI: torch.Tensor, packed_OI: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`, [T, O]."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, packed_OI, None, "none", [], "")
    return product


def _has_packed_kernel(weight_OI: torch.Tensor) -> bool:
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
