"""Which arithmetic a device does, and whether two workers do the same."""

import re
from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash

from common.errors import ConfigError
from common.kv.pool import BlockId
from common.kv.store import KVLayout
from common.model.attention import TILE
from common.model.batch import Chunk
from common.model.config import ExpertsConfig, GroupedAttention, ModelConfig, RopeConfig, RouterConfig
from common.model.dtype import dtype_name
from common.model.kernels.interface import Kernels
from common.model.layers import FP32_MULTIPLE, per_head_product
from common.model.rope import Angles, RotaryTable

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
    return _DTYPES[dtype_name(name, config)]


def is_exact(device: torch.device) -> bool:
    """Whether results on this device are independent of the batch, bit for bit; proved for the CPU only."""
    return device.type == "cpu"


def numerics_fingerprint(device: torch.device, dtype: torch.dtype, kernels: Kernels) -> str:
    """Equal on two workers only if they compute the same bits: a description, and the digest of a probe.

    The probe runs the kernels themselves, so it also sees what no version number tells (an instruction set limited by
    an environment variable, another BLAS).
    """
    parts = {
        "device": _device_name(device),
        "kernels": kernels.name,
        "torch": torch.__version__,
        "onednn": _onednn_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "tile": TILE,
        "pad": FP32_MULTIPLE,
        "probe": _probe(device, dtype, kernels),
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
def _probe(device: torch.device, dtype: torch.dtype, kernels: Kernels) -> str:
    """Digest of what the kernels make of fixed numbers, at sizes of published models."""
    random = np.random.Generator(np.random.PCG64(0))

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32)).to(device)

    digest = xxhash.xxh3_64()
    parts = (
        _products(draw, dtype, kernels),
        _experts(draw, dtype, kernels),
        _heads(draw, dtype, kernels),
        _attention(draw, dtype, kernels),
        _latent_attention(draw, dtype),
        _routers(draw, dtype, kernels),
    )
    for result in (result for part in parts for result in part):
        digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _products(draw: Draw, dtype: torch.dtype, kernels: Kernels) -> Iterator[torch.Tensor]:
    norm = draw(2048).to(dtype)
    linear = kernels.linear(kernels.pack(draw(256, 2048).to(dtype)))
    gated = kernels.gated(kernels.pack(draw(256, 2048).to(dtype), fused=True), kernels.pack(draw(2048, 128).to(dtype)))
    for num_rows in _NUM_ROWS:
        normed = kernels.add_norm(draw(num_rows, 2048).to(dtype), None, norm, 1e-6)
        yield from (normed, linear(normed), gated(normed))


def _experts(draw: Draw, dtype: torch.dtype, kernels: Kernels) -> Iterator[torch.Tensor]:
    """With biases and the activation that has most operations; some experts get many rows, some none."""
    num_experts, size, hidden = 4, 64, 256
    config = ExpertsConfig(num_experts, size, bias=True, activation="clamped_swiglu", alpha=1.702, limit=7.0)
    gate_up = [kernels.pack(draw(2 * size, hidden).to(dtype), fused=True) for _ in range(num_experts)]
    down = [kernels.pack(draw(hidden, size).to(dtype)) for _ in range(num_experts)]
    experts = kernels.experts(
        config, gate_up, down, draw(num_experts, 2 * size).to(dtype), draw(num_experts, hidden).to(dtype)
    )
    for num_rows in _NUM_ROWS:
        ids_T2 = torch.arange(2 * num_rows, device=draw(1).device, dtype=torch.int32).view(num_rows, 2) % 3
        yield experts(draw(num_rows, hidden).to(dtype), ids_T2, draw(num_rows, 2).abs())


def _heads(draw: Draw, dtype: torch.dtype, kernels: Kernels) -> Iterator[torch.Tensor]:
    config = GroupedAttention(num_heads=4, num_kv_heads=2, head_dim=64, rotary_dim=64, qk_norm="head", clip_qkv=8.0)
    heads = kernels.heads(config, draw(6, 64), 1e-6, dtype)
    slots_T = torch.arange(48, device=draw(1).device)
    table = RotaryTable(RopeConfig(), config.rotary_dim, slots_T.device, len(slots_T))
    kv_CSGD = torch.zeros(2, len(slots_T), 2, 64, dtype=dtype, device=slots_T.device)
    yield heads.split(draw(48, 8 * 64).to(dtype), Angles(table, slots_T), slots_T, kv_CSGD)
    yield kv_CSGD


def _attention(draw: Draw, dtype: torch.dtype, kernels: Kernels) -> Iterator[torch.Tensor]:
    """A sequence of one tile and a half: its last token alone, and all of them at once."""
    length, block_size, num_heads = TILE * 3 // 2, 16, 4
    blocks = [BlockId(block) for block in range(1, 1 + length // block_size)]
    layout = KVLayout(1, 2, 64, block_size, dtype)
    num_slots = length + block_size
    kv_CSGD = draw(2, num_slots, 2, 64).to(dtype)
    for num_tokens in (1, length):
        chunk = Chunk([0] * num_tokens, length - num_tokens, blocks, wants_logits=False, wants_rows=False)
        plan = kernels.plan_attention([chunk], num_heads, frozenset({None}), layout, num_slots, kv_CSGD.device)
        yield plan.attend(draw(num_tokens, num_heads, 64).to(dtype), kv_CSGD)


def _latent_attention(draw: Draw, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Into the space of the compressed vector, and out of it."""
    for num_inputs, num_outputs in ((128, 512), (512, 128)):
        weight_NIO = draw(2, num_inputs, num_outputs).to(dtype)
        for num_rows in _NUM_ROWS:
            yield per_head_product(draw(num_rows, 2, num_inputs).to(dtype), weight_NIO)


def _routers(draw: Draw, dtype: torch.dtype, kernels: Kernels) -> Iterator[torch.Tensor]:
    """Some families choose experts in fp32 whatever the compute dtype is, which may take another library's kernels."""
    for router_dtype in (dtype, torch.float32):
        weight_EH = draw(256, 7168).to(router_dtype)
        for config in (RouterConfig(), RouterConfig(scoring="sigmoid")):
            router = kernels.router(config, 8, weight_EH, None, None, dtype)
            for num_rows in _NUM_ROWS:
                # Ids differ in type from set to set.
                ids, weights = router.choose(draw(num_rows, 7168).to(dtype))
                yield from (ids.long(), weights)
