"""Which arithmetic a device does, and whether two workers do the same."""

import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash

from common.errors import ConfigError
from common.model.attention import TILE
from common.model.config import ModelConfig
from common.model.layers import (
    FP32_MULTIPLE,
    batched_product,
    linear,
    per_head_product,
    prepare_weight,
    sigmoid,
    silu_gated,
)

#: Takes the sizes of a tensor and fills it with the next fixed numbers.
Draw = Callable[..., torch.Tensor]

#: Few rows and many take different kernels.
_NUM_ROWS = (1, 256)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """The device for --device: "auto" is cuda where there is one. Raises ConfigError."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if name == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu", param="device")
    return torch.device(name)


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """The compute dtype for --dtype: "auto" is what the checkpoint declares. Raises ConfigError."""
    declared = config.dtype if name == "auto" else name
    if declared not in _DTYPES:
        raise ConfigError(
            f"the checkpoint declares dtype {declared}, which is not computed here; "
            f"choose --dtype {' or '.join(_DTYPES)}",
            param="dtype",
        )
    return _DTYPES[declared]


def is_exact(device: torch.device) -> bool:
    """Whether results on this device are independent of the batch, bit for bit; proved for the CPU only."""
    return device.type == "cpu"


def numerics_fingerprint(device: torch.device, dtype: torch.dtype) -> str:
    """Equal on two workers only if they compute the same bits: a description, and the digest of a probe.

    The probe runs the kernels themselves, so it also sees what no version number tells (an instruction set limited by
    an environment variable, another BLAS).
    """
    parts = {
        "device": _device_name(device),
        "torch": torch.__version__,
        "onednn": _onednn_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "tile": TILE,
        "pad": FP32_MULTIPLE,
        "probe": _probe(device, dtype),
    }
    return " ".join(f"{key}={value}" for key, value in parts.items())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).replace(" ", "-")
    return f"cpu/{torch.backends.cpu.get_cpu_capability()}".replace(" ", "-")


def _onednn_version() -> str:
    found = re.search(r"DNN v([\w.]+)", torch.__config__.show())
    return found.group(1) if found else "none"


@torch.inference_mode()
def _probe(device: torch.device, dtype: torch.dtype) -> str:
    """Digest of fixed products and of the functions between them, at sizes of published models."""
    random = np.random.Generator(np.random.PCG64(0))

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32)).to(device)

    digest = xxhash.xxh3_64()
    for part in (_layers(draw, dtype), _latent_attention(draw, dtype), _fp32_router(draw)):
        for result in part:
            digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _layers(draw: Draw, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    weight = prepare_weight(draw(256, 2048).to(dtype))
    for num_rows in _NUM_ROWS:
        product = linear(draw(num_rows, 2048).to(dtype), weight)
        weights_XRI = torch.softmax(product.float(), -1).to(dtype)[:1].expand(1, FP32_MULTIPLE, -1)
        yield from (product, silu_gated(product), batched_product(weights_XRI, draw(1, TILE, 64).to(dtype)))


def _latent_attention(draw: Draw, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Into the space of the compressed vector, and out of it."""
    for num_inputs, num_outputs in ((128, 512), (512, 128)):
        weight_NIO = draw(2, num_inputs, num_outputs).to(dtype)
        for num_rows in _NUM_ROWS:
            yield per_head_product(draw(num_rows, 2, num_inputs).to(dtype), weight_NIO)


def _fp32_router(draw: Draw) -> Iterator[torch.Tensor]:
    """Some families choose experts in fp32 whatever the compute dtype is, which takes another library's kernels."""
    weight = draw(256, 7168)
    for num_rows in _NUM_ROWS:
        logits = linear(draw(num_rows, 7168), weight)
        yield from (logits, sigmoid(logits), torch.softmax(logits, dim=-1))
