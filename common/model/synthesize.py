"""Writes seeded random checkpoints in the form that Hugging Face checkpoints have.

The weights are drawn so that the model is no good but behaves like a real one: routers and head are scaled up, so that
choices are clear-cut and greedy decoding does not fall into one token; norm weights and biases differ from their
neutral values, so that leaving one out shows.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from common.errors import CheckpointError, ConfigError
from common.model.config import ModelConfig
from common.model.families import config_from_json
from common.model.presets import PRESETS, synthetic_config
from common.model.quantized.config import Quantization
from common.model.quantized.pack import pack_tensor
from common.model.tensors import EMBEDDING, LM_HEAD, Shape, checkpoint_tensors
from common.model.tokenizer_training import BOS_ID, MIN_VOCAB_SIZE, PAD_ID, write_tokenizer
from common.progress import Advance, progress_bar

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: Ending of the one tensor that is written in fp32 whatever the checkpoint's dtype, as published checkpoints have it.
_CORRECTION = "e_score_correction_bias"

FloatArray = npt.NDArray[np.float32]


def synthesize(
    family: str,
    preset: str,
    seed: int,
    overrides: Mapping[str, Any],
    out: Path,
    *,
    quantization: Quantization | None = None,
    shard_bytes: int | None = None,
    progress: bool = False,
) -> None:
    """Writes a checkpoint with a tokenizer into `out`; the same arguments give the same bytes.

    Args:
        family: a key of `FAMILIES`.
        preset: a key of `PRESETS`.
        seed: not negative.
        overrides: config.json values that replace the preset's, e.g. {"num_experts": 257}.
        out: a directory that does not exist yet or is empty.
        quantization: how weights are stored that published checkpoints of this kind quantise; None: as they are.
        shard_bytes: largest safetensors file before quantisation, instead of the preset's.
        progress: draw a progress bar on stderr, if that is a terminal.

    Raises:
        ConfigError: an argument is wrong, or there is no room; the message says which and why.
    """
    values = synthetic_config(family, preset, overrides)
    if quantization is not None:
        values["quantization_config"] = quantization.to_json()
    config = _check(values, seed)
    _make_empty(out)
    num_bytes = sum(map(math.prod, checkpoint_tensors(config).values())) * _DTYPES[config.dtype].itemsize
    _require_room(out, num_bytes)
    with progress_bar("writing", num_bytes, in_bytes=True) if progress else nullcontext(_ignore) as advance:
        _write_weights(out, config, seed, shard_bytes or PRESETS[preset].shard_bytes, advance)
    write_tokenizer(out, config.vocab_size, config.max_position_embeddings)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": values["eos_token_id"], "pad_token_id": PAD_ID}
    _write_json(out / "generation_config.json", generation)
    # Last, so that a checkpoint whose making was interrupted is not taken for a whole one.
    _write_json(out / "config.json", values)


def _check(values: dict[str, Any], seed: int) -> ModelConfig:
    if seed < 0:
        raise ConfigError(f"the seed must not be negative, got {seed}", param="seed")
    try:
        config = config_from_json(values, {}, source="config.json")
    except CheckpointError as error:
        raise ConfigError(f"these values make no model: {error.message}", param="set") from error
    if config.vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {config.vocab_size}, but a byte-level tokenizer needs {MIN_VOCAB_SIZE}", param="set"
        )
    if config.dtype not in _DTYPES:
        raise ConfigError(f"torch_dtype is {config.dtype!r}; choose one of {', '.join(_DTYPES)}", param="set")
    return config


def _make_empty(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        occupied = any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}", param="out") from error
    if occupied:
        raise ConfigError(f"{out} is not empty; choose another directory or remove it first", param="out")


def _require_room(out: Path, num_bytes: int) -> None:
    """Before anything is drawn. What is quantised takes less."""
    free = shutil.disk_usage(out).free
    if num_bytes > free:
        raise ConfigError(
            f"{out} needs {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free there; "
            "choose another directory or smaller sizes",
            param="out",
        )


def _ignore(_: int) -> None:
    """Nobody wants to know how far it is."""


def _write_weights(out: Path, config: ModelConfig, seed: int, shard_bytes: int, advance: Advance) -> None:
    """Calls `advance` with the bytes of each tensor before quantisation."""
    shapes = checkpoint_tensors(config)
    dtype = _DTYPES[config.dtype]
    shards = list(_plan_shards(shapes, dtype.itemsize, shard_bytes))
    weight_map: dict[str, str] = {}
    total = 0
    for index, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05}-of-{len(shards):05}.safetensors"
        drawn = {}
        for name in names:
            drawn[name] = _tensor(name, shapes[name], config, seed, dtype)
            advance(math.prod(shapes[name]) * dtype.itemsize)
        tensors = {k: v for name in names for k, v in pack_tensor(name, drawn[name], config.quantization).items()}
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # safetensors makes it readable by its owner only
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _plan_shards(shapes: Mapping[str, Shape], itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    """Names in checkpoint order, cut before a file would outgrow `shard_bytes`; no file is empty."""
    shard: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * itemsize
        if shard and filled + size > shard_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _draw(name: str, shape: Shape, config: ModelConfig, seed: int) -> FloatArray:
    """Values of one tensor; they depend on the seed, the name and the shape, not on what was drawn before."""
    random = np.random.default_rng([seed, *name.encode()])
    values = random.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * values
    return np.float32(_scale(name, shape, config)) * values


def _tensor(name: str, shape: Shape, config: ModelConfig, seed: int, dtype: torch.dtype) -> torch.Tensor:
    is_fp32 = name.endswith(_CORRECTION)
    return torch.from_numpy(_draw(name, shape, config, seed)).to(torch.float32 if is_fp32 else dtype)


def _scale(name: str, shape: Shape, config: ModelConfig) -> float:
    """Standard deviation of a tensor's values."""
    if name.endswith(_CORRECTION):  # a fraction of the spread of the scores, which are sigmoids
        return 0.05
    if name.endswith(".sinks"):
        return 0.5
    if name.endswith(("_bias", ".bias")):
        return 0.1
    if name.endswith((".gate.weight", ".router.weight")):  # a router: logits of standard deviation 2
        return 2.0 / math.sqrt(config.hidden_size)
    if name == LM_HEAD or (name == EMBEDDING and config.tie_word_embeddings):
        return 3.0 / math.sqrt(config.hidden_size)
    if name == EMBEDDING:
        return 1.0
    # Fused experts are stored as [E, in, out], everything else as [out, in].
    return 1.0 / math.sqrt(shape[-2 if len(shape) == 3 else -1])


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
