"""Single operations of the native kernels: tensors in, addresses out.

Shape suffixes as in `common.model.kernels.interface`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.model.config import GroupedAttention
from common.model.kernels.interface import PackedWeight
from common.model.native import interface
from common.model.rope import Angles
from common.routing.capture import LayerRows


def address(tensor: torch.Tensor | None) -> int:
    """0 for none."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels read contiguous tensors"
    return tensor.data_ptr()


def typed(module: interface.NativeModule, dtype: torch.dtype) -> interface.Typed:
    """The functions and classes for tensors of that dtype."""
    return module.float32 if dtype == torch.float32 else module.bfloat16


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """One product. Holds the tensors whose addresses `call` has."""

    call: interface.Linear
    weight: PackedWeight
    bias_O: torch.Tensor | None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.stride(1) == 1, "rows are contiguous"
        y_TO = x_TI.new_empty(x_TI.shape[0], self.weight.num_outputs)
        self.call(x_TI.data_ptr(), x_TI.stride(0), x_TI.shape[0], y_TO.data_ptr())
        return y_TO


@dataclass(frozen=True, slots=True)
class NativeRouter:
    """Scores and choice in one call, which also writes the routing rows."""

    call: interface.Router
    top_k: int
    tensors: tuple[torch.Tensor | None, ...]

    def choose(self, x_TH: torch.Tensor, rows: LayerRows | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        ids_TK = torch.empty(x_TH.shape[0], self.top_k, dtype=torch.int32)
        weights_TK = torch.empty(x_TH.shape[0], self.top_k)
        place = (0, 0, 0) if rows is None else (rows.address, rows.row_bytes, rows.id_bytes)
        self.call(address(x_TH), x_TH.shape[0], ids_TK.data_ptr(), weights_TK.data_ptr(), *place)
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
        self.call(address(x_TH), address(ids_TK), address(weights_TK), x_TH.shape[0], ids_TK.shape[1], y_TH.data_ptr())
        return y_TH


@dataclass(frozen=True, slots=True)
class NativeGated:
    """A dense feed-forward block: one expert that every token goes through."""

    expert: NativeExperts

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        ids_T1 = torch.zeros(x_TI.shape[0], 1, dtype=torch.int32)
        return self.expert(x_TI, ids_T1, torch.ones(x_TI.shape[0], 1))


@dataclass(frozen=True, slots=True)
class NativeHeads:
    """Norm, bound, rotation, scale and the writing of keys and values in one call."""

    call: interface.Heads
    config: GroupedAttention
    qk_norm: torch.Tensor | None

    def split(
        self, fused_TO: torch.Tensor, angles: Angles, slots_T: torch.Tensor, kv_CSGD: torch.Tensor
    ) -> torch.Tensor:
        q_TND = fused_TO.new_empty(fused_TO.shape[0], self.config.num_heads, self.config.head_dim)
        keys, plane_bytes = address(kv_CSGD), kv_CSGD[0].nbytes
        self.call(
            address(fused_TO),
            angles.table.cos_PR.data_ptr(),
            angles.table.sin_PR.data_ptr(),
            address(angles.positions_T),
            address(slots_T),
            fused_TO.shape[0],
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
        keys = address(kv_CSGD)
        typed(self.module, q_TND.dtype).attend(
            num_heads,
            num_kv_heads,
            key_dim,
            out_TNV.shape[2],
            self.block_size,
            window or 0,
            address(sinks_N),
            address(q_TND),
            keys,
            keys + (num_planes - 1) * kv_CSGD[0].nbytes,
            self.block_table.ctypes.data,
            self.sequences.ctypes.data,
            len(self.sequences),
            out_TNV.data_ptr(),
        )
        return out_TNV
