"""Builds one decoder layer from the tensors of a checkpoint, as its configuration says.

Shape suffixes: E experts, F feed-forward width, H hidden size, N query heads, G KV heads, D head size.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from common.model.config import ExpertsConfig, GroupedAttention, ModelConfig
from common.model.decoder import Attention, DecoderLayer
from common.model.grouped_attention import GroupedQueryAttention
from common.model.latent_loader import load_latent_attention
from common.model.layers import GatedFeedForward, clamped_swiglu, prepare_weight, silu_gated
from common.model.moe import Activation, Experts, MoeFeedForward, SharedExpert
from common.model.router import Router
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


def load_layer(source: TensorSource, config: ModelConfig, layer: int) -> DecoderLayer:
    """Layer number `layer`, dense or MoE."""
    is_moe = layer in config.moe_layers
    return DecoderLayer(
        input_norm=source.tensor(layer_tensor(layer, "input_layernorm.weight")),
        attention=_attention(source, config, layer),
        feed_forward_norm=source.tensor(layer_tensor(layer, "post_attention_layernorm.weight")),
        feed_forward=_moe(source, config, layer) if is_moe else _gated(source, dense_tensors(layer)),
    )


def _attention(source: TensorSource, config: ModelConfig, layer: int) -> Attention:
    if isinstance(config.attention, GroupedAttention):
        return _grouped_attention(source, config, config.attention, layer)
    return load_latent_attention(source, config.attention, layer)


def _grouped_attention(
    source: TensorSource, config: ModelConfig, attention: GroupedAttention, layer: int
) -> GroupedQueryAttention:
    def names(parts: str, suffix: str) -> list[str]:
        return [layer_tensor(layer, f"self_attn.{part}_{suffix}") for part in parts]

    return GroupedQueryAttention(
        config=attention,
        qkv=prepare_weight(source.joined(*names("qkv", "proj.weight"))),
        qkv_bias=source.joined(*names("qkv", "proj.bias")) if attention.qkv_bias else None,
        out=prepare_weight(source.tensor(*names("o", "proj.weight"))),
        out_bias=source.tensor(*names("o", "proj.bias")) if attention.out_bias else None,
        qk_norm=_qk_norm(source, attention, names("qk", "norm.weight")) if attention.qk_norm else None,
        eps=config.rms_norm_eps,
        sinks=source.fp32(layer_tensor(layer, "self_attn.sinks")) if attention.sinks else None,
    )


def _qk_norm(source: TensorSource, attention: GroupedAttention, names: list[str]) -> torch.Tensor:
    """One row per head, fp32 [N + G, D], so that query and key heads are scaled together."""
    query, key = (source.tensor(name).float().view(-1, attention.head_dim) for name in names)
    return torch.cat((query.expand(attention.num_heads, -1), key.expand(attention.num_kv_heads, -1)))


def _gated(source: TensorSource, names: tuple[str, str, str]) -> GatedFeedForward:
    gate, up, down = names
    return GatedFeedForward(prepare_weight(source.joined(gate, up)), prepare_weight(source.tensor(down)))


def _moe(source: TensorSource, config: ModelConfig, layer: int) -> MoeFeedForward:
    load = _fused_experts if has_fused_experts(config) else _experts
    return MoeFeedForward(
        _router(source, config, layer), load(source, config, layer), _shared_expert(source, config, layer)
    )


def _router(source: TensorSource, config: ModelConfig, layer: int) -> Router:
    read = source.fp32 if config.router.fp32 else source.tensor
    return Router(
        config=config.router,
        top_k=config.top_k,
        weight=read(router_tensor(config, layer)),
        bias_E=read(router_tensor(config, layer, "bias")) if config.router.bias else None,
        correction_E=source.fp32(correction_tensor(config, layer)) if config.router.correction_bias else None,
    )


def _experts(source: TensorSource, config: ModelConfig, layer: int) -> Experts:
    num_experts, size, hidden = config.num_experts, config.experts.size, config.hidden_size
    names = [expert_tensors(config, layer, expert) for expert in range(num_experts)]

    def write_gate_up(out: torch.Tensor, gate: str, up: str) -> None:
        source.fill(out[:size], gate)
        source.fill(out[size:], up)

    return Experts(
        gate_up=_each_prepared(
            source, (num_experts, 2 * size, hidden), (partial(write_gate_up, gate=gate, up=up) for gate, up, _ in names)
        ),
        down=_each_prepared(
            source, (num_experts, hidden, size), (partial(source.fill, name=down) for _, _, down in names)
        ),
        activate=_activation(config.experts),
    )


def _fused_experts(source: TensorSource, config: ModelConfig, layer: int) -> Experts:
    gate_up, down = fused_expert_tensors(config, layer)
    num_experts, size, hidden = config.num_experts, config.experts.size, config.hidden_size
    gate_up_bias = down_bias = None
    if config.experts.bias:
        gate_up_bias = source.empty(num_experts, 2 * size)
        _write_gate_up(gate_up_bias.T, source.read(f"{gate_up}_bias").T)
        down_bias = source.tensor(f"{down}_bias")
    return Experts(
        gate_up=_each_prepared(
            source,
            (num_experts, 2 * size, hidden),
            (partial(_write_gate_up, alternating=weight_IO.T) for weight_IO in source.slices(gate_up)),
        ),
        down=_each_prepared(
            source,
            (num_experts, hidden, size),
            (partial(torch.Tensor.copy_, other=weight_IO.T) for weight_IO in source.slices(down)),
        ),
        activate=_activation(config.experts),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def _each_prepared(
    source: TensorSource, shape_EOI: tuple[int, int, int], writers: Iterable[Callable[[torch.Tensor], object]]
) -> list[torch.Tensor]:
    """Prepares experts one by one, because all of them can have gigabytes; each writer fills the place it is given.

    Where a prepared weight is a copy, all are made from one buffer; where it is not, all share one allocation, because
    thousands of small ones would leave the heap in fragments.
    """
    buffer_OI = source.empty(*shape_EOI[1:])
    is_copy = prepare_weight(buffer_OI) is not buffer_OI
    places = [buffer_OI] * shape_EOI[0] if is_copy else source.empty(*shape_EOI)
    prepared = []
    for write, place_OI in zip(writers, places, strict=True):
        write(place_OI)
        prepared.append(prepare_weight(place_OI))
    return prepared


def _write_gate_up(out: torch.Tensor, alternating: torch.Tensor) -> None:
    """Gate rows, then up rows, from rows that alternate."""
    size = len(out) // 2
    out[:size].copy_(alternating[0::2])
    out[size:].copy_(alternating[1::2])


def _activation(experts: ExpertsConfig) -> Activation:
    if experts.activation == "clamped_swiglu":
        return partial(clamped_swiglu, alpha=experts.alpha, limit=experts.limit)
    return silu_gated


def _shared_expert(source: TensorSource, config: ModelConfig, layer: int) -> SharedExpert | None:
    if config.experts.shared_size is None:
        return None
    gate = source.tensor(shared_gate_tensor(config, layer)) if config.experts.shared_gate else None
    return SharedExpert(_gated(source, shared_tensors(config, layer)), gate)
