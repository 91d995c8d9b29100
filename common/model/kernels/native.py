"""The kernels of `common.model.native`: the same interface over C++.

Shape suffixes as in `common.model.kernels.interface`; X experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.kv.store import KVLayout
from common.model import native
from common.model.batch import Chunk
from common.model.config import ExpertsConfig, GroupedAttention, RouterConfig
from common.model.kernels.interface import AttentionPlan, Heads, Linear, PackedWeight, Router
from common.model.native import interface
from common.model.native.pages import HugePages
from common.model.rope import Angles
from common.routing.capture import LayerRows

#: Outputs per panel of a packed weight.
LANES = 16

_SCORING = {"softmax": 0, "sigmoid": 1, "chosen_softmax": 2}
_ACTIVATION = {"swiglu": 0, "clamped_swiglu": 1}
_QK_NORM = {None: 0, "head": 1, "all": 2}
#: The router of one expert that every token goes through: it counts in full.
_ONLY_EXPERT = ExpertsConfig(num_experts=1, size=0)


def _address(tensor: torch.Tensor | None) -> int:
    """0 for none."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels read contiguous tensors"
    return tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """One product. Holds the tensors whose addresses `call` has."""

    call: interface.Linear
    weight: PackedWeight
    bias_O: torch.Tensor | None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.stride(1) == 1, "rows are contiguous"
        y_TO = x_TI.new_empty(len(x_TI), self.weight.num_outputs)
        self.call(x_TI.data_ptr(), x_TI.stride(0), len(x_TI), y_TO.data_ptr())
        return y_TO


@dataclass(frozen=True, slots=True)
class NativeRouter:
    """Scores and choice in one call, which also writes the routing rows."""

    call: interface.Router
    top_k: int
    tensors: tuple[torch.Tensor | None, ...]

    def choose(self, x_TH: torch.Tensor, rows: LayerRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        ids_TK = torch.empty(len(x_TH), self.top_k, dtype=torch.int32)
        weights_TK = torch.empty(len(x_TH), self.top_k)
        place = (0, 0, 0) if rows is None else (rows.address, rows.row_bytes, rows.id_bytes)
        self.call(_address(x_TH), len(x_TH), ids_TK.data_ptr(), weights_TK.data_ptr(), *place)
        return ids_TK, weights_TK


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Dispatch, both products, activation and sum in one call."""

    call: interface.Experts
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    biases: tuple[torch.Tensor | None, ...]

    def __call__(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        assert (ids_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)
        y_TH = torch.empty_like(x_TH)
        self.call(_address(x_TH), _address(ids_TK), _address(weights_TK), len(x_TH), ids_TK.shape[1], y_TH.data_ptr())
        return y_TH


@dataclass(frozen=True, slots=True)
class NativeGated:
    """A dense feed-forward block: one expert that every token goes through."""

    expert: NativeExperts

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        ids_T1 = torch.zeros(len(x_TI), 1, dtype=torch.int32)
        return self.expert(x_TI, ids_T1, torch.ones(len(x_TI), 1))


@dataclass(frozen=True, slots=True)
class NativeHeads:
    """Norm, bound, rotation, scale and the writing of keys and values in one call."""

    call: interface.Heads
    config: GroupedAttention
    qk_norm: torch.Tensor | None

    def split(
        self, fused_TO: torch.Tensor, angles: Angles, slots_T: torch.Tensor, kv_CSGD: torch.Tensor
    ) -> torch.Tensor:
        q_TND = fused_TO.new_empty(len(fused_TO), self.config.num_heads, self.config.head_dim)
        keys, plane_bytes = _address(kv_CSGD), kv_CSGD[0].nbytes
        self.call(
            _address(fused_TO),
            angles.table.cos_PR.data_ptr(),
            angles.table.sin_PR.data_ptr(),
            _address(angles.positions_T),
            _address(slots_T),
            len(fused_TO),
            q_TND.data_ptr(),
            keys,
            keys + plane_bytes,
        )
        return q_TND


@dataclass(frozen=True, slots=True)
class NativeAttentionPlan:
    """Block ids of all sequences, one after the other, and per sequence where its tokens and blocks begin."""

    module: interface.NativeModule
    block_size: int
    block_table: npt.NDArray[np.int32]
    #: int64 [sequences, 4]: first token in the batch, number of tokens, position of the first, place in the table.
    sequences: npt.NDArray[np.int64]

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_CSGD: torch.Tensor,
        *,
        window: int | None = None,
        value_dim: int | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_tokens, num_heads, key_dim = q_TND.shape
        num_planes, _, num_kv_heads, _ = kv_CSGD.shape
        out_TNV = q_TND.new_empty(num_tokens, num_heads, value_dim or key_dim)
        keys = _address(kv_CSGD)
        _typed(self.module, q_TND.dtype).attend(
            num_heads,
            num_kv_heads,
            key_dim,
            out_TNV.shape[2],
            self.block_size,
            window or 0,
            _address(sinks_N),
            _address(q_TND),
            keys,
            keys + (num_planes - 1) * kv_CSGD[0].nbytes,
            self.block_table.ctypes.data,
            self.sequences.ctypes.data,
            len(self.sequences),
            out_TNV.data_ptr(),
        )
        return out_TNV


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
        self._typed(weight_OI.dtype).pack(_address(weight_OI), num_outputs, num_inputs, fused, data.data_ptr())
        return PackedWeight(data.view(weight_OI.dtype), num_outputs, num_inputs)

    def copies(self, weight_OI: torch.Tensor) -> bool:
        return True

    def linear(self, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> Linear:
        call = self._typed(weight.data.dtype).Linear(
            weight=weight.data.data_ptr(),
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            bias=_address(bias_O),
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
            bias=_address(bias_E),
            correction=_address(correction_E),
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
            gate_bias=_address(gate_bias),
            up_bias=_address(up_bias),
            down_bias=_address(down_bias_EH),
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
            norm_weight=_address(qk_norm),
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
            _address(x_TH),
            _address(delta_TH),
            _address(weight_H),
            eps,
            len(x_TH),
            x_TH.shape[1],
            normed_TH.data_ptr(),
        )
        return normed_TH

    def _typed(self, dtype: torch.dtype) -> interface.Typed:
        return _typed(self._module, dtype)


def _typed(module: interface.NativeModule, dtype: torch.dtype) -> interface.Typed:
    return module.float32 if dtype == torch.float32 else module.bfloat16
