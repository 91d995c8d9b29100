"""All layers of a decoder in one native call.

Shape suffixes: T tokens, H hidden size, L layers, C planes of the cache, S slots, G KV heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.model.decoder import DecoderLayer
from common.model.feed_forward import MoeFeedForward
from common.model.grouped_attention import GroupedQueryAttention
from common.model.kernels.native_ops import (
    NativeAttentionPlan,
    NativeExperts,
    NativeHeads,
    NativeLinear,
    NativeRouter,
)
from common.model.native import interface
from common.model.plan import ForwardPlan
from common.model.rope import Angles
from common.routing.capture import RoutingCapture


@dataclass(frozen=True, slots=True)
class NativeStack:
    """Computes what the layers compute one by one, with the same functions; holds what `call` has the addresses of."""

    call: interface.Layers
    layers: Sequence[DecoderLayer]

    def forward(
        self,
        x_TH: torch.Tensor,
        angles: Angles,
        plan: ForwardPlan,
        kv_LCSGD: torch.Tensor,
        capture: RoutingCapture | None,
    ) -> torch.Tensor:
        """See `MoeDecoder.forward`; `x_TH` is overwritten."""
        assert isinstance(plan.attention, NativeAttentionPlan)
        assert x_TH.is_contiguous()
        assert kv_LCSGD.is_contiguous()
        first = None if capture is None else capture.layer(0)
        rows = (0, 0, 0, 0) if first is None else (first.address, first.row_bytes, first.id_bytes, first.layer_bytes)
        self.call(
            x_TH.shape[0],
            plan.positions_T.data_ptr(),
            plan.slots_T.data_ptr(),
            angles.table.cos_PR.data_ptr(),
            angles.table.sin_PR.data_ptr(),
            plan.attention.block_size,
            plan.attention.block_table.ctypes.data,
            plan.attention.sequences.ctypes.data,
            len(plan.attention.sequences),
            kv_LCSGD.data_ptr(),
            kv_LCSGD[0, 0].numel(),
            *rows,
            x_TH.data_ptr(),
        )
        return x_TH


def stack(call: interface.Layers, layers: Sequence[DecoderLayer]) -> NativeStack | None:
    """All layers, added to `call`; None where one is of a kind that the call does not know."""
    for layer in layers:
        attention, block = layer.attention, layer.feed_forward
        if (
            not isinstance(attention, GroupedQueryAttention)
            or not isinstance(block, MoeFeedForward)
            or block.shared is not None
        ):
            return None
        assert isinstance(attention.qkv, NativeLinear)
        assert isinstance(attention.out, NativeLinear)
        assert isinstance(attention.heads, NativeHeads)
        assert isinstance(block.router, NativeRouter)
        assert isinstance(block.experts, NativeExperts)
        call.add(
            layer.input_norm.data_ptr(),
            layer.feed_forward_norm.data_ptr(),
            attention.qkv.call,
            attention.heads.call,
            attention.out.call,
            attention.window or 0,
            0 if attention.sinks is None else attention.sinks.data_ptr(),
            block.router.call,
            block.experts.call,
        )
    return NativeStack(call, layers)
