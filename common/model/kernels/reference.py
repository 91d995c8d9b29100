"""The kernels in plain torch: they run wherever torch does, and are what the native ones are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from common.kv.store import KVLayout
from common.model.attention import QueryGroup, plan_groups
from common.model.batch import Chunk
from common.model.config import ExpertsConfig, GroupedAttention, RouterConfig
from common.model.decoder import DecoderLayer
from common.model.kernels.interface import AttentionPlan, Experts, Heads, Kernels, Linear, PackedWeight, Router, Stack
from common.model.layers import GatedFeedForward, clamped_swiglu, linear, prepare_weight, rms_norm, silu_gated
from common.model.moe import Activation, TorchExperts
from common.model.rope import Angles, rotate
from common.model.router import TorchRouter


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """See `common.model.layers.linear`."""

    weight: torch.Tensor
    bias_O: torch.Tensor | None = None

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self.bias_O)


@dataclass(frozen=True, slots=True)
class TorchHeads:
    """Norm, bound, rotation and scale are computed in fp32 and rounded once."""

    config: GroupedAttention
    qk_norm: torch.Tensor | None
    eps: float

    def split(
        self, fused_TO: torch.Tensor, angles: Angles, slots_T: torch.Tensor, kv_CSGD: torch.Tensor
    ) -> torch.Tensor:
        q_TND, k_TGD, v_TGD = self._apart(fused_TO, angles)
        kv_CSGD[0].index_copy_(0, slots_T, k_TGD)
        kv_CSGD[1].index_copy_(0, slots_T, v_TGD)
        return q_TND

    def _apart(self, fused_TO: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = fused_TO.view(len(fused_TO), -1, self.config.head_dim)
        qk, v_TGD = heads[:, : -self.config.num_kv_heads].float(), heads[:, -self.config.num_kv_heads :]
        if self.qk_norm is not None:
            qk = self._normed(qk) * self.qk_norm
        if (bound := self.config.clip_qkv) is not None:
            qk, v_TGD = qk.clamp(-bound, bound), v_TGD.clamp(-bound, bound)
        qk = rotate(qk, *angles.cos_sin)
        q_TND = qk[:, : self.config.num_heads] * self.config.head_dim**-0.5
        return q_TND.to(fused_TO.dtype), qk[:, self.config.num_heads :].to(fused_TO.dtype), v_TGD

    def _normed(self, qk: torch.Tensor) -> torch.Tensor:
        """Query and key heads over their root mean square: each head's own, or that of all heads of its kind."""
        if self.config.qk_norm == "head":
            return F.rms_norm(qk, (self.config.head_dim,), None, self.eps)
        parts = qk[:, : self.config.num_heads], qk[:, self.config.num_heads :]
        return torch.cat([F.rms_norm(part, part.shape[1:], None, self.eps) for part in parts], dim=1)


@dataclass(frozen=True, slots=True)
class TorchAttentionPlan:
    """See `common.model.attention`."""

    #: By sliding window.
    groups: dict[int | None, list[QueryGroup]]

    def attend(
        self,
        q_TND: torch.Tensor,
        kv_CSGD: torch.Tensor,
        *,
        window: int | None = None,
        value_dim: int | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        cache, num_kv_heads = kv_CSGD.view(-1, kv_CSGD.shape[-1]), kv_CSGD.shape[2]
        attended = [
            group.attend(q_TND[group.tokens], cache, num_kv_heads, value_dim=value_dim, sinks_N=sinks_N)
            for group in self.groups[window]
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)


class TorchKernels:
    """`Kernels` in plain torch."""

    name = "torch"

    def pack(self, weight_OI: torch.Tensor, *, fused: bool = False) -> PackedWeight:
        return PackedWeight(prepare_weight(weight_OI), *weight_OI.shape)

    def copies(self, weight_OI: torch.Tensor) -> bool:
        return prepare_weight(weight_OI) is not weight_OI

    def linear(self, weight: PackedWeight, bias_O: torch.Tensor | None = None) -> Linear:
        return TorchLinear(weight.data, bias_O)

    def gated(self, gate_up: PackedWeight, down: PackedWeight) -> Linear:
        return GatedFeedForward(gate_up.data, down.data)

    def router(
        self,
        config: RouterConfig,
        top_k: int,
        weight_EH: torch.Tensor,
        bias_E: torch.Tensor | None,
        correction_E: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> Router:
        return TorchRouter(config, top_k, weight_EH, bias_E, correction_E)

    def experts(
        self,
        config: ExpertsConfig,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        gate_up_bias_EO: torch.Tensor | None,
        down_bias_EH: torch.Tensor | None,
    ) -> Experts:
        return TorchExperts(
            [weight.data for weight in gate_up],
            [weight.data for weight in down],
            _activation(config),
            gate_up_bias_EO,
            down_bias_EH,
        )

    def heads(self, config: GroupedAttention, qk_norm: torch.Tensor | None, eps: float, dtype: torch.dtype) -> Heads:
        return TorchHeads(config, qk_norm, eps)

    def plan_attention(
        self,
        chunks: Sequence[Chunk],
        num_heads: int,
        windows: frozenset[int | None],
        layout: KVLayout,
        num_slots: int,
        device: torch.device,
    ) -> AttentionPlan:
        return TorchAttentionPlan(
            {window: plan_groups(chunks, num_heads, window, layout, num_slots, device) for window in windows}
        )

    def add_norm(
        self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta_TH is not None:
            x_TH += delta_TH
        return rms_norm(x_TH, weight_H, eps)

    def stack(self, layers: Sequence[DecoderLayer], eps: float) -> Stack | None:
        return None


def _activation(config: ExpertsConfig) -> Activation:
    if config.activation == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=config.alpha, limit=config.limit)
    return silu_gated


TORCH: Kernels = TorchKernels()
