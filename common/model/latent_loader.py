"""Loads latent attention: splits the projection out of the compressed vector, and takes interleaved pairs apart.

Shape suffixes: N query heads, P dimensions of a head that do not rotate, C dimensions of the compressed vector, V value
dimensions of a head.
"""

import torch

from common.model.config import LatentAttention
from common.model.kernels.interface import Kernels, Linear
from common.model.latent_attention import CompressedQuery, MultiHeadLatentAttention
from common.model.rope import interleaved_rows
from common.model.tensor_source import TensorSource
from common.model.tensors import layer_tensor


def load_latent_attention(
    source: TensorSource, config: LatentAttention, layer: int, kernels: Kernels
) -> MultiHeadLatentAttention:
    def tensor(name: str) -> torch.Tensor:
        return source.tensor(layer_tensor(layer, f"self_attn.{name}"))

    def bias(name: str) -> torch.Tensor | None:
        return tensor(f"{name}.bias") if config.bias else None

    def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return kernels.linear(kernels.pack(weight), bias)

    is_compressed = config.query_rank is not None
    query = tensor("q_b_proj.weight" if is_compressed else "q_proj.weight")
    key_value_bias = bias("kv_a_proj_with_mqa")
    absorb_NPC, expand_NCV = _split(tensor("kv_b_proj.weight"), config)
    return MultiHeadLatentAttention(
        config=config,
        compressed_query=CompressedQuery(
            linear(tensor("q_a_proj.weight"), bias("q_a_proj")), tensor("q_a_layernorm.weight")
        )
        if is_compressed
        else None,
        query=linear(_rotary_apart(query, config, config.num_heads)),
        key_value=linear(
            _rotary_apart(tensor("kv_a_proj_with_mqa.weight"), config, 1),
            None if key_value_bias is None else _rotary_apart(key_value_bias, config, 1),
        ),
        key_value_norm=tensor("kv_a_layernorm.weight"),
        absorb_NPC=absorb_NPC,
        expand_NCV=expand_NCV,
        out=linear(tensor("o_proj.weight"), bias("o_proj")),
    )


def _split(kv_b: torch.Tensor, config: LatentAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, P, C] and [N, C, V], each contiguous, from rows that are each head's key, then its value."""
    heads = kv_b.view(config.num_heads, config.plain_dim + config.value_dim, config.kv_rank)
    key, value = heads.tensor_split((config.plain_dim,), dim=1)
    return key.contiguous(), value.transpose(1, 2).contiguous()


def _rotary_apart(rows: torch.Tensor, config: LatentAttention, num_heads: int) -> torch.Tensor:
    """The rows of a projection, or its bias, whose heads each end in the rotated dimensions."""
    if not config.interleaved:
        return rows
    order = torch.arange(len(rows)).view(num_heads, -1)
    order[:, -config.rotary_dim :] = order[:, -config.rotary_dim :][:, interleaved_rows(config.rotary_dim)]
    return rows[order.flatten().to(rows.device)]
