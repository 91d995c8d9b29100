"""Loads a checkpoint: every expected tensor, nothing else, straight into the form that the decoder computes with.

Shape suffixes: E experts, F feed-forward width, H hidden size.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from common.errors import CheckpointError
from common.model.checkpoint import CheckpointFiles
from common.model.config import ModelConfig
from common.model.decoder import Attention, DecoderLayer, MoeDecoder
from common.model.layers import GatedFeedForward, prepare_weight
from common.model.moe import Experts, MoeFeedForward, Router
from common.model.progress import Advance, loading_progress
from common.model.tensors import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    checkpoint_tensors,
    dense_tensors,
    expert_tensors,
    layer_tensor,
    router_tensor,
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and the fingerprint of the checkpoint that it came from."""

    decoder: MoeDecoder
    #: xxh3-128, hex, over the configuration and name, shape, dtype and bytes of every tensor, however it is sharded.
    fingerprint: str


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: bool,
    max_positions: int | None = None,
) -> LoadedModel:
    """Loads the checkpoint in `path` and converts it to the compute dtype.

    Args:
        progress: draw a progress bar on stderr, or log lines where that is no terminal.
        max_positions: length of the longest sequence; by default what the checkpoint allows. A table has that size.

    Raises:
        CheckpointError: a file is broken, or a tensor is missing, unknown or of the wrong shape.
    """
    with CheckpointFiles(path) as files, loading_progress(files.num_bytes, enabled=progress) as advance:
        files.check(checkpoint_tensors(config), optional=_optional_tensors(config))
        source = _TensorSource(files, dtype, device, advance)
        decoder = _build_decoder(source, config, max_positions)
        _check_tied_head(files, config)
    return LoadedModel(decoder, source.fingerprint(config))


class _TensorSource:
    """Copies tensors into place, converted, and keeps a digest of each as it stood in the checkpoint."""

    def __init__(self, files: CheckpointFiles, dtype: torch.dtype, device: torch.device, advance: Advance) -> None:
        self._files = files
        self._dtype = dtype
        self._device = device
        self._advance = advance
        self._digests: dict[str, str] = {}

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def fill(self, out: torch.Tensor, name: str) -> None:
        """Copies one tensor into `out`, which has its shape."""
        tensor = self._files.read(name)
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        self._digests[name] = f"{list(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(raw)}"
        out.copy_(tensor)
        self._advance(raw.nbytes)

    def tensor(self, name: str) -> torch.Tensor:
        out = self.empty(*self._files.shape(name))
        self.fill(out, name)
        return out

    def joined(self, *names: str) -> torch.Tensor:
        """Tensors one below the other, along the first dimension."""
        sizes = [self._files.shape(name)[0] for name in names]
        out = self.empty(sum(sizes), *self._files.shape(names[0])[1:])
        for part, name in zip(torch.split(out, sizes), names, strict=True):
            self.fill(part, name)
        return out

    def fingerprint(self, config: ModelConfig) -> str:
        lines = [json.dumps(dataclasses.asdict(config), sort_keys=True, default=sorted)]
        lines += [f"{name} {self._digests[name]}" for name in sorted(self._digests)]
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())


def _build_decoder(source: _TensorSource, config: ModelConfig, max_positions: int | None) -> MoeDecoder:
    embedding = source.tensor(EMBEDDING)
    layers = [_layer(source, config, index) for index in range(config.num_layers)]
    final_norm = source.tensor(FINAL_NORM)
    lm_head = embedding if config.tie_word_embeddings else source.tensor(LM_HEAD)
    return MoeDecoder(config, embedding, layers, final_norm, prepare_weight(lm_head), max_positions)


def _layer(source: _TensorSource, config: ModelConfig, layer: int) -> DecoderLayer:
    is_moe = layer in config.moe_layers
    return DecoderLayer(
        input_norm=source.tensor(layer_tensor(layer, "input_layernorm.weight")),
        attention=_attention(source, config, layer),
        feed_forward_norm=source.tensor(layer_tensor(layer, "post_attention_layernorm.weight")),
        feed_forward=_moe(source, config, layer) if is_moe else _dense(source, layer),
    )


def _attention(source: _TensorSource, config: ModelConfig, layer: int) -> Attention:
    def names(parts: str, suffix: str) -> list[str]:
        return [layer_tensor(layer, f"self_attn.{part}_{suffix}") for part in parts]

    biased = config.attention_bias
    return Attention(
        qkv=prepare_weight(source.joined(*names("qkv", "proj.weight"))),
        qkv_bias=source.joined(*names("qkv", "proj.bias")) if biased else None,
        out=prepare_weight(source.tensor(*names("o", "proj.weight"))),
        out_bias=source.tensor(*names("o", "proj.bias")) if biased else None,
        qk_norm=_qk_norm(source, config, names("qk", "norm.weight")) if config.qk_norm else None,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )


def _qk_norm(source: _TensorSource, config: ModelConfig, names: list[str]) -> torch.Tensor:
    """One row per head, fp32 [N + G, D], so that query and key heads are normed together."""
    query, key = (source.tensor(name).float() for name in names)
    return torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))


def _dense(source: _TensorSource, layer: int) -> GatedFeedForward:
    gate, up, down = dense_tensors(layer)
    return GatedFeedForward(prepare_weight(source.joined(gate, up)), prepare_weight(source.tensor(down)))


def _moe(source: _TensorSource, config: ModelConfig, layer: int) -> MoeFeedForward:
    # One allocation for all experts, because thousands of short-lived ones would leave the heap in fragments.
    gate_up_EFH = source.empty(config.num_experts, 2 * config.expert_size, config.hidden_size)
    down_EHF = source.empty(config.num_experts, config.hidden_size, config.expert_size)
    for expert in range(config.num_experts):
        gate, up, down = expert_tensors(config, layer, expert)
        source.fill(gate_up_EFH[expert, : config.expert_size], gate)
        source.fill(gate_up_EFH[expert, config.expert_size :], up)
        source.fill(down_EHF[expert], down)
    router = Router(source.tensor(router_tensor(config, layer)), config.top_k, config.norm_topk_prob)
    experts = Experts([prepare_weight(w) for w in gate_up_EFH], [prepare_weight(w) for w in down_EHF])
    return MoeFeedForward(router, experts)


def _optional_tensors(config: ModelConfig) -> frozenset[str]:
    return frozenset({LM_HEAD}) if config.tie_word_embeddings else frozenset()


def _check_tied_head(files: CheckpointFiles, config: ModelConfig) -> None:
    """A tied checkpoint may repeat the embedding as its head, but not contradict it."""
    if config.tie_word_embeddings and LM_HEAD in files and not torch.equal(files.read(LM_HEAD), files.read(EMBEDDING)):
        raise CheckpointError(
            f"{files.path}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}; set it to false"
        )
