"""The kernels of `common.model.native`: the same interface over C++.

Shape suffixes as in `common.model.kernels.interface`; X experts.
"""

from collections.abc import Sequence

import numpy as np
import torch

from common.kv.store import KVLayout
from common.model import native
from common.model.batch import Chunk
from common.model.config import ExpertsConfig, GroupedAttention, RouterConfig
from common.model.decoder import DecoderLayer
from common.model.kernels.interface import AttentionPlan, Heads, Linear, PackedWeight, Router, Stack
from common.model.kernels.native_ops import (
    NativeAttentionPlan,
    NativeExperts,
    NativeGated,
    NativeHeads,
    NativeLinear,
    NativeRouter,
    address,
    typed,
)
from common.model.kernels.native_stack import stack
from common.model.native import interface
from common.model.native.pages import HugePages

#: Outputs per panel of a packed weight.
LANES = 16

_SCORING = {"softmax": 0, "sigmoid": 1, "chosen_softmax": 2}
_ACTIVATION = {"swiglu": 0, "clamped_swiglu": 1}
_QK_NORM = {None: 0, "head": 1, "all": 2}
#: The router of one expert that every token goes through: it counts in full.
_ONLY_EXPERT = ExpertsConfig(num_experts=1, size=0)


class NativeKernels:
    """`Kernels` of one extension module. Numbers of inputs are even: two bf16 are multiplied at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module = native.load(name)
        self._pages = HugePages()

    @property
    def name(self) -> str:
        return self._name

    def pack(self, weight_OI: torch.Tensor, *, fused: bool = False) -> PackedWeight:
        num_outputs, num_inputs = weight_OI.shape
        assert num_inputs % 2 == 0, "an even number of inputs"
        num_parts = 2 if fused else 1
        num_panels = -(-num_outputs // num_parts // LANES) * num_parts
        data = self._pages.take(num_panels * LANES * num_inputs * weight_OI.itemsize)
        self._typed(weight_OI.dtype).pack(address(weight_OI), num_outputs, num_inputs, fused, data.data_ptr())
        return PackedWeight(data.view(weight_OI.dtype), num_outputs, num_inputs)

    def copies(self, weight_OI: torch.Tensor) -> bool:
        return True

    def linear(self, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> Linear:
        call = self._typed(weight.data.dtype).Linear(
            weight=weight.data.data_ptr(),
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            bias=address(bias_O),
        )
        return NativeLinear(call, weight, bias_O)

    def gated(self, gate_up: PackedWeight, down: PackedWeight) -> Linear:
        return NativeGated(self.experts(_ONLY_EXPERT, [gate_up], [down], None, None))

    def router(
        self,
        config: RouterConfig,
        top_k: int,
        weight_EH: torch.Tensor,
        bias_E: torch.Tensor | None,
        correction_E: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Router:
        weight = self.pack(weight_EH)
        is_mixed = dtype == torch.bfloat16 and weight_EH.dtype == torch.float32
        make = self._module.bfloat16.Fp32Router if is_mixed else self._typed(dtype).Router
        call = make(
            weight=weight.data.data_ptr(),
            num_experts=weight.num_outputs,
            hidden=weight.num_inputs,
            bias=address(bias_E),
            correction=address(correction_E),
            scoring=_SCORING[config.scoring],
            normalize=config.normalize,
            normalize_eps=config.normalize_eps,
            scale=config.scale,
            top_k=top_k,
            num_groups=config.num_groups,
            num_groups_kept=config.num_groups_kept,
            num_group_scores=config.num_group_scores,
        )
        return NativeRouter(call, top_k, (weight.data, bias_E, correction_E))

    def experts(
        self,
        config: ExpertsConfig,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        gate_up_bias_EO: torch.Tensor | None,
        down_bias_EH: torch.Tensor | None,
    ) -> NativeExperts:
        assert {weight.num_inputs for weight in gate_up} == {weight.num_outputs for weight in down}
        gate_bias, up_bias = None, None
        if gate_up_bias_EO is not None:
            gate_bias, up_bias = (half.contiguous() for half in gate_up_bias_EO.chunk(2, dim=1))
        call = self._typed(down[0].data.dtype).Experts(
            gate_up=[weight.data.data_ptr() for weight in gate_up],
            down=[weight.data.data_ptr() for weight in down],
            hidden=down[0].num_outputs,
            width=down[0].num_inputs,
            gate_bias=address(gate_bias),
            up_bias=address(up_bias),
            down_bias=address(down_bias_EH),
            activation=_ACTIVATION[config.activation],
            alpha=config.alpha,
            limit=config.limit,
        )
        return NativeExperts(call, gate_up, down, (gate_bias, up_bias, down_bias_EH))

    def heads(self, config: GroupedAttention, qk_norm: torch.Tensor | None, eps: float, dtype: torch.dtype) -> Heads:
        call = self._typed(dtype).Heads(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            rotary_dim=config.rotary_dim,
            norm=_QK_NORM[config.qk_norm],
            norm_weight=address(qk_norm),
            eps=eps,
            bound=config.clip_qkv or 0.0,
            scale=config.head_dim**-0.5,
        )
        return NativeHeads(call, config, qk_norm)

    def plan_attention(
        self,
        chunks: Sequence[Chunk],
        num_heads: int,
        windows: frozenset[int | None],
        layout: KVLayout,
        num_slots: int,
        device: torch.device,
    ) -> AttentionPlan:
        counts = np.array([len(chunk.token_ids) for chunk in chunks])
        num_blocks = np.array([-(-chunk.end // layout.block_size) for chunk in chunks])
        sequences = np.empty((len(chunks), 4), np.int64)
        sequences[:, 0] = np.cumsum(counts) - counts
        sequences[:, 1] = counts
        sequences[:, 2] = [chunk.start for chunk in chunks]
        sequences[:, 3] = np.cumsum(num_blocks) - num_blocks
        tables = [chunk.blocks[:used] for chunk, used in zip(chunks, num_blocks.tolist(), strict=True)]
        return NativeAttentionPlan(self._module, layout.block_size, np.concatenate(tables, dtype=np.int32), sequences)

    def add_norm(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        normed_TH = torch.empty_like(x_TH)
        self._typed(x_TH.dtype).add_norm(
            address(x_TH),
            address(delta_TH),
            address(weight_H),
            eps,
            x_TH.shape[0],
            x_TH.shape[1],
            normed_TH.data_ptr(),
        )
        return normed_TH

    def stack(self, layers: Sequence[DecoderLayer], eps: float) -> Stack | None:
        return stack(self._typed(layers[0].input_norm.dtype).Layers(eps), layers)

    def _typed(self, dtype: torch.dtype) -> interface.Typed:
        return typed(self._module, dtype)
