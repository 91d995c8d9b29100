"""Loads a checkpoint: every expected tensor, nothing else, straight into the form that the decoder computes with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from common.errors import CheckpointError, ConfigError
from common.model.checkpoint import CheckpointTensors
from common.model.config import ModelConfig
from common.model.decoder import MoeDecoder
from common.model.kernels.choice import choose_kernels
from common.model.kernels.interface import Kernels
from common.model.layer_loader import load_layer
from common.model.progress import loading_progress
from common.model.quantized.files import open_checkpoint
from common.model.rope import rotary_digest
from common.model.tensor_source import TensorSource
from common.model.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, checkpoint_tensors, layer_tensor


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder and the fingerprint of the checkpoint that it came from."""

    decoder: MoeDecoder
    #: xxh3-128, hex, over the configuration, rotary frequencies, and name, shape, dtype and bytes of every tensor that
    #: is loaded, dequantised but not yet converted; however the checkpoint is sharded.
    fingerprint: str


def load_model(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: bool,
    max_positions: int | None = None,
    kernels: Kernels | None = None,
) -> LoadedModel:
    """Loads the checkpoint in `path` and converts it to the compute dtype.

    Args:
        progress: draw a progress bar on stderr, or log lines where that is no terminal.
        max_positions: length of the longest sequence; by default what the checkpoint was trained for. A table has
            that size, and kinds of rotary scaling that depend on the length take this one.
        kernels: by default the fastest ones for this device and model.

    Raises:
        CheckpointError: a file is broken, or a tensor is missing, unknown or of the wrong shape.
    """
    with open_checkpoint(path, config.quantization) as files:
        check_files(files, config)
        with loading_progress(files.num_bytes(checkpoint_tensors(config)), enabled=progress) as advance:
            source = TensorSource(files, dtype, device, advance)
            decoder = build_decoder(source, config, kernels or choose_kernels("auto", device, config), max_positions)
    rotary = rotary_digest(config.rope, config.attention.rotary_dim, decoder.max_positions)
    return LoadedModel(decoder, source.fingerprint(config, rotary))


def check_files(files: CheckpointTensors, config: ModelConfig) -> None:
    """Raises CheckpointError unless there is every tensor that the model needs, and no other."""
    files.check(checkpoint_tensors(config), optional=_optional_tensors(files, config))
    _check_tied_head(files, config)


@contextmanager
def room_for_weights(path: Path) -> Iterator[None]:
    """Turns what torch and NumPy raise when memory is out into a ConfigError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise ConfigError(
            f"there is no room in memory for the weights of {path}; close other programs, or take a machine with more"
        ) from error


def build_decoder(source: TensorSource, config: ModelConfig, kernels: Kernels, max_positions: int | None) -> MoeDecoder:
    """Reads every tensor of `checkpoint_tensors`, once."""
    embedding = source.tensor(EMBEDDING)
    layers = [load_layer(source, config, index, kernels) for index in range(config.num_layers)]
    final_norm = source.tensor(FINAL_NORM)
    lm_head = embedding if config.tie_word_embeddings else source.tensor(LM_HEAD)
    head = kernels.linear(kernels.pack(lm_head))
    return MoeDecoder(config, kernels, embedding, layers, final_norm, head, max_positions)


def _optional_tensors(files: CheckpointTensors, config: ModelConfig) -> frozenset[str]:
    """What may be there beside what is computed with: the layers that predict further tokens, and a repeated head."""
    extra = range(config.num_layers, config.num_layers + config.num_extra_layers)
    prefixes = {layer_tensor(layer, "") for layer in extra}
    depth = layer_tensor(0, "").count(".")
    optional = {name for name in files.names() if ".".join(name.split(".")[:depth]) + "." in prefixes}
    return frozenset(optional | {LM_HEAD} if config.tie_word_embeddings else optional)


def _check_tied_head(files: CheckpointTensors, config: ModelConfig) -> None:
    """A tied checkpoint may repeat the embedding as its head, but not contradict it."""
    if config.tie_word_embeddings and LM_HEAD in files and not torch.equal(files.read(LM_HEAD), files.read(EMBEDDING)):
        raise CheckpointError(
            f"{files.path}: tie_word_embeddings is true, but {LM_HEAD} differs from {EMBEDDING}; set it to false"
        )
