"""Which set of kernels a worker computes with: chosen once, when it starts."""

import functools

import structlog
import torch

from common.errors import ConfigError
from common.model import native
from common.model.config import GroupedAttention, LatentAttention, ModelConfig
from common.model.kernels.interface import Kernels
from common.model.kernels.native import NativeKernels
from common.model.kernels.reference import TORCH

_log = structlog.get_logger(__name__)


def choose_kernels(name: str, device: torch.device, config: ModelConfig) -> Kernels:
    """The kernels for --kernels; "auto" is the fastest set that computes this model on this device.

    Raises:
        ConfigError: what was asked for is not to be had here.
    """
    if name == "torch":
        return TORCH
    reason = _why_not_native(device, config)
    if name == "auto":
        return TORCH if reason else _fastest()
    if reason is None:
        try:
            return _native(name)
        except ImportError as error:
            reason = str(error)
    raise ConfigError(f"--kernels {name}: {reason}; use --kernels auto or torch", param="kernels")


def available_kernels(device: torch.device, config: ModelConfig) -> list[Kernels]:
    """All sets that compute this model on this device, fastest first."""
    if _why_not_native(device, config) is not None:
        return [TORCH]
    return [*(_native(name) for name in native.available()), TORCH]


@functools.cache
def _native(name: str) -> Kernels:
    return NativeKernels(name)


@functools.cache
def _fastest() -> Kernels:
    """Warns, once, when nothing native can be used."""
    names = native.available()
    if names:
        return _native(names[0])
    reasons = "; ".join(f"{name}: {native.why_unavailable(name)}" for name in native.VARIANTS)
    _log.warning("native_kernels_unavailable", fallback=TORCH.name, reasons=reasons)
    return TORCH


def _why_not_native(device: torch.device, config: ModelConfig) -> str | None:
    if device.type != "cpu":
        return f"native kernels compute on the CPU, not on {device.type}"
    odd = [f"{name} is {size}" for name, size in _sizes(config).items() if size % 2]
    return f"native kernels take two inputs at a time, and {', '.join(odd)}" if odd else None


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Everything that a product has as its number of inputs."""
    sizes = {
        "the hidden size": config.hidden_size,
        "the width of experts": config.experts.size,
        "that of the shared expert": config.experts.shared_size or 0,
        "that of dense layers": config.dense_size,
        "the size of a cached vector": config.kv_dim,
    }
    match config.attention:
        case GroupedAttention(num_heads=num_heads, head_dim=head_dim):
            return sizes | {"the width of all heads": num_heads * head_dim}
        case LatentAttention(num_heads=num_heads, value_dim=value_dim, query_rank=query_rank):
            return sizes | {"the width of all heads": num_heads * value_dim, "the query rank": query_rank or 0}
