"""Which arithmetic a device does, and whether two workers do the same."""

import re

import numpy as np
import torch
import xxhash

from common.errors import ConfigError
from common.model.attention import TILE
from common.model.config import ModelConfig
from common.model.layers import FP32_MULTIPLE, batched_product, linear, prepare_weight, silu_gated

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
    """Digest of fixed products (few rows, many rows, batched) and of the functions between them."""
    random = np.random.Generator(np.random.PCG64(0))

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32)).to(device, dtype)

    digest = xxhash.xxh3_64()
    weight = prepare_weight(draw(256, 2048))
    for num_rows in (1, 256):
        product = linear(draw(num_rows, 2048), weight)
        activated = silu_gated(product)
        weights_XRI = torch.softmax(product.float(), -1).to(dtype)[:1].expand(1, FP32_MULTIPLE, -1)
        attended = batched_product(weights_XRI, draw(1, TILE, 64))
        for result in (product, activated, attended):
            digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
