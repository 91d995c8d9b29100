"""Whether workers here could load a checkpoint, and what they would compute it with."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import ModelSettings
from common.errors import ConfigError, MoerelayError
from deploy.doctor.check import Check, amount
from deploy.doctor.machine import Kernels
from deploy.host import Host
from router.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import torch

    from common.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Model:
    """What a worker would compute one checkpoint with."""

    model: str
    family: str
    device: str
    dtype: str
    #: What --kernels auto takes.
    kernels: str
    #: Workers with equal ones compute the same bits.
    numerics: str
    #: All sets, as far as this model is concerned.
    available: tuple[Kernels, ...]
    #: Of one worker: its weights, as it holds them.
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Use:
    """What is to be started of a checkpoint on this machine."""

    dtype: str = "auto"
    workers: int = 2
    kv_cache_bytes: int = 2**30
    device: str = "auto"
    #: Tokens; None: as many as the checkpoint and the KV cache allow.
    max_model_len: int | None = None


def examine(name: str, use: Use, host: Host) -> tuple[Model | None, list[Check]]:
    """What is known of the checkpoint, and a line for everything that must be right about it."""
    # Late: all of these import torch, or take their time.
    from common.model.families import parse_config
    from common.model.hub import resolve_model

    try:
        path = resolve_model(name)
        config = parse_config(path)
        model = _model(name, use, config)
    except MoerelayError as error:
        return None, [Check.of_error("model", error)]
    found = f"{name}: {model.family}, {model.dtype} on {model.device}, kernels {model.kernels}"
    checks = [Check("model", "ok", found), Check("numerics", "ok", model.numerics)]
    checks += [_files(path, config), _tokenizer(path), _memory(model, use, host), _context(model, use, config)]
    return model, checks


def _model(name: str, use: Use, config: "ModelConfig") -> Model:
    from common.model import native
    from common.model.kernels.choice import choose_kernels
    from common.model.numerics import numerics_fingerprint, resolve_device, resolve_dtype

    device = resolve_device(use.device)
    dtype, kernels = resolve_dtype(use.dtype, config), choose_kernels("auto", device, config)

    def why_not(variant: str) -> str | None:
        try:
            choose_kernels(variant, device, config)
        except ConfigError as error:
            return error.message.removeprefix(f"--kernels {variant}: ").removesuffix("; use --kernels auto or torch")
        return None

    return Model(
        model=name,
        family=config.family,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        kernels=kernels.name,
        numerics=numerics_fingerprint(device, dtype, kernels),
        available=tuple(Kernels(variant, why_not(variant)) for variant in (*native.VARIANTS, "torch")),
        weight_bytes=_weight_bytes(config, dtype),
    )


def _weight_bytes(config: "ModelConfig", dtype: "torch.dtype") -> int:
    from common.model.tensors import checkpoint_tensors

    return sum(map(math.prod, checkpoint_tensors(config).values())) * dtype.itemsize


def _files(path: Path, config: "ModelConfig") -> Check:
    """Headers only: every file opens and has its length, and each tensor is there in its shape."""
    from common.model.loader import check_files
    from common.model.quantized.files import open_checkpoint

    try:
        with open_checkpoint(path, config.quantization) as files:
            check_files(files, config)
            return Check("weights", "ok", f"{len(files.names())} tensors, complete and readable")
    except MoerelayError as error:
        return Check.of_error("weights", error)


def _tokenizer(path: Path) -> Check:
    try:
        tokenizer = load_tokenizer(path)
    except MoerelayError as error:
        return Check.of_error("tokenizer", error)
    if tokenizer is None:
        found = "the checkpoint has none, so that prompts and answers are token ids"
        return Check("tokenizer", "warn", found, f"put its tokenizer.json into {path}")
    return Check("tokenizer", "ok", "complete and readable")


def _memory(model: Model, use: Use, host: Host) -> Check:
    """Weights and KV of all workers, beside what there is."""
    each = model.weight_bytes + use.kv_cache_bytes
    wanted = f"{amount(model.weight_bytes)} of weights and {amount(use.kv_cache_bytes)} of KV"
    found = f"{use.workers} workers with {wanted} each" if use.workers > 1 else f"a worker with {wanted}"
    available = _available(model.device, host)
    if available is None:
        return Check("room", "ok", f"{found}; how much memory there is, the system does not tell")
    found = f"{found} need {amount(use.workers * each)}, and {amount(available)} are available"
    if use.workers * each > available:
        fix = "lower --kv-cache-memory, start fewer workers here, or take a machine with more memory"
        return Check("room", "bad", found, fix)
    return Check("room", "ok", found)


def _context(model: Model, use: Use, config: "ModelConfig") -> Check:
    from common.model.dtype import DTYPE_BYTES
    from common.worker.context import blocks_within, context_length

    # Another --block-size makes a difference of less than a block.
    block_size: int = ModelSettings.model_fields["block_size"].default
    try:
        num_blocks = blocks_within(use.kv_cache_bytes, config, block_size, DTYPE_BYTES[model.dtype])
        length = context_length(use.max_model_len, config, num_blocks * block_size)
    except ConfigError as error:
        return Check.of_error("context", error)
    return Check("context", "ok", f"{length} tokens; the KV cache of a worker holds {num_blocks * block_size}")


def _available(device: str, host: Host) -> int | None:
    """Bytes that new workers could have."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    bounds = [bound for bound in (host.memory_available, host.memory_limit) if bound is not None]
    return min(bounds, default=None)
