"""Builds one decoder layer from the tensors of a checkpoint, as its configuration says.

Shape suffixes: E experts, F feed-forward width, H hidden size, N query heads, G KV heads, D head size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from common.model.config import GroupedAttention, ModelConfig
from common.model.decoder import Attention, DecoderLayer
from common.model.feed_forward import DenseFeedForward, MoeFeedForward, SharedExpert
from common.model.grouped_attention import GroupedQueryAttention
from common.model.kernels.interface import Experts, Kernels, Linear, PackedWeight, Router
from common.model.latent_loader import load_latent_attention
from common.model.tensor_source import TensorSource
from common.model.tensors import (
    correction_tensor,
    dense_tensors,
    expert_tensors,
    fused_expert_tensors,
    has_fused_experts,
    layer_tensor,
    router_tensor,
    shared_gate_tensor,
    shared_tensors,
)


def load_layer(source: TensorSource, config: ModelConfig, layer: int, kernels: Kernels) -> DecoderLayer:
    """Layer number `layer`, dense or MoE."""
    loader, is_moe = _LayerLoader(source, config, layer, kernels), layer in config.moe_layers
    return DecoderLayer(
        input_norm=source.tensor(layer_tensor(layer, "input_layernorm.weight")),
        attention=loader.attention(),
        feed_forward_norm=source.tensor(layer_tensor(layer, "post_attention_layernorm.weight")),
        feed_forward=loader.moe() if is_moe else DenseFeedForward(loader.gated(dense_tensors(layer))),
    )


@dataclass(frozen=True, slots=True)
class _LayerLoader:
    source: TensorSource
    config: ModelConfig
    layer: int
    kernels: Kernels

    def attention(self) -> Attention:
        attention = self.config.attention
        if isinstance(attention, GroupedAttention):
            return self._grouped_attention(attention)
        return load_latent_attention(self.source, attention, self.layer, self.kernels)

    def _grouped_attention(self, attention: GroupedAttention) -> GroupedQueryAttention:
        source, kernels, config = self.source, self.kernels, self.config

        def names(parts: str, suffix: str) -> list[str]:
            return [layer_tensor(self.layer, f"self_attn.{part}_{suffix}") for part in parts]

        qk_norm = self._qk_norm(attention, names("qk", "norm.weight")) if attention.qk_norm else None
        return GroupedQueryAttention(
            qkv=kernels.linear(
                kernels.pack(source.joined(*names("qkv", "proj.weight"))),
                source.joined(*names("qkv", "proj.bias")) if attention.qkv_bias else None,
            ),
            heads=kernels.heads(attention, qk_norm, config.rms_norm_eps, source.dtype),
            out=kernels.linear(
                kernels.pack(source.tensor(*names("o", "proj.weight"))),
                source.tensor(*names("o", "proj.bias")) if attention.out_bias else None,
            ),
            window=config.sliding_windows[self.layer],
            sinks=source.fp32(layer_tensor(self.layer, "self_attn.sinks")) if attention.sinks else None,
        )

    def _qk_norm(self, attention: GroupedAttention, names: list[str]) -> torch.Tensor:
        """One row per head, fp32 [N + G, D], so that query and key heads are scaled together."""
        query, key = (self.source.tensor(name).float().view(-1, attention.head_dim) for name in names)
        return torch.cat((query.expand(attention.num_heads, -1), key.expand(attention.num_kv_heads, -1)))

    def gated(self, names: tuple[str, str, str]) -> Linear:
        """A dense feed-forward block."""
        gate, up, down = names
        gate_up = self.kernels.pack(self.source.joined(gate, up), fused=True)
        return self.kernels.gated(gate_up, self.kernels.pack(self.source.tensor(down)))

    def moe(self) -> MoeFeedForward:
        """Router, experts, and the shared expert where there is one."""
        experts = self._fused_experts() if has_fused_experts(self.config) else self._experts()
        return MoeFeedForward(self._router(), experts, self._shared_expert())

    def _router(self) -> Router:
        source, config, layer = self.source, self.config, self.layer
        read = source.fp32 if config.router.fp32 else source.tensor
        return self.kernels.router(
            config.router,
            config.top_k,
            read(router_tensor(config, layer)),
            read(router_tensor(config, layer, "bias")) if config.router.bias else None,
            source.fp32(correction_tensor(config, layer)) if config.router.correction_bias else None,
            source.dtype,
        )

    def _experts(self) -> Experts:
        source, config, size = self.source, self.config, self.config.experts.size
        names = [expert_tensors(config, self.layer, expert) for expert in range(config.num_experts)]

        def write_gate_up(out: torch.Tensor, gate: str, up: str) -> None:
            source.fill(out[:size], gate)
            source.fill(out[size:], up)

        return self.kernels.experts(
            config.experts,
            self._gate_ups([partial(write_gate_up, gate=gate, up=up) for gate, up, _ in names]),
            self._downs([partial(source.fill, name=down) for _, _, down in names]),
            None,
            None,
        )

    def _fused_experts(self) -> Experts:
        source, config = self.source, self.config
        gate_up, down = fused_expert_tensors(config, self.layer)
        gate_up_bias = down_bias = None
        if config.experts.bias:
            gate_up_bias = source.empty(config.num_experts, 2 * config.experts.size)
            _write_gate_up(gate_up_bias.T, source.read(f"{gate_up}_bias").T)
            down_bias = source.tensor(f"{down}_bias")
        return self.kernels.experts(
            config.experts,
            self._gate_ups(partial(_write_gate_up, alternating=weight_IO.T) for weight_IO in source.slices(gate_up)),
            self._downs(partial(torch.Tensor.copy_, other=weight_IO.T) for weight_IO in source.slices(down)),
            gate_up_bias,
            down_bias,
        )

    def _gate_ups(self, writers: Iterable[Callable[[torch.Tensor], object]]) -> list[PackedWeight]:
        return self._each_packed((2 * self.config.experts.size, self.config.hidden_size), writers, fused=True)

    def _downs(self, writers: Iterable[Callable[[torch.Tensor], object]]) -> list[PackedWeight]:
        return self._each_packed((self.config.hidden_size, self.config.experts.size), writers, fused=False)

    def _each_packed(
        self, shape_OI: tuple[int, int], writers: Iterable[Callable[[torch.Tensor], object]], *, fused: bool
    ) -> list[PackedWeight]:
        """Packs experts one by one, because all of them can have gigabytes; each writer fills the place it is given.

        Where a packed weight is a copy, all are made from one buffer; where it is not, all share one allocation,
        because thousands of small ones would leave the heap in fragments.
        """
        num_experts, buffer_OI = self.config.num_experts, self.source.empty(*shape_OI)
        copies = self.kernels.copies(buffer_OI)
        places = [buffer_OI] * num_experts if copies else self.source.empty(num_experts, *shape_OI)
        packed = []
        for write, place_OI in zip(writers, places, strict=True):
            write(place_OI)
            packed.append(self.kernels.pack(place_OI, fused=fused))
        return packed

    def _shared_expert(self) -> SharedExpert | None:
        if self.config.experts.shared_size is None:
            return None
        has_gate = self.config.experts.shared_gate
        gate = self.source.tensor(shared_gate_tensor(self.config, self.layer)) if has_gate else None
        return SharedExpert(self.gated(shared_tensors(self.config, self.layer)), gate)


def _write_gate_up(out: torch.Tensor, alternating: torch.Tensor) -> None:
    """Gate rows, then up rows, from rows that alternate."""
    size = len(out) // 2
    out[:size].copy_(alternating[0::2])
    out[size:].copy_(alternating[1::2])
