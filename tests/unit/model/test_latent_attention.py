"""Latent attention over compressed vectors against the unabsorbed form of the paper, and its independence of the batch.

Shape suffixes: T tokens, N heads, P dimensions of a head that do not rotate, R rotated ones, C compressed dimensions.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file

from common.model.checkpoint import CheckpointFiles
from common.model.config import LatentAttention
from common.model.families import parse_config
from common.model.layers import per_head_product
from common.model.plan import ForwardPlan, plan_forward
from common.model.quantized.config import block_fp8
from common.model.quantized.files import open_checkpoint
from common.model.rope import Angles, RotaryTable
from common.model.synthesize import synthesize
from tests.unit.model.harness import Harness, chunk, load_decoder, make_checkpoint, solo_run

Array = npt.NDArray[np.float64]

_SMALL = {"num_hidden_layers": 2, "torch_dtype": "float32", "rope_scaling": None, "attention_bias": True}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain-queries": ("deepseek_v2", _SMALL),
    "compressed-queries": ("deepseek_v3", _SMALL),
    "not-interleaved": ("deepseek_v3", {**_SMALL, "rope_interleave": False}),
    "odd-sizes": (
        "deepseek_v3",
        {**_SMALL, "kv_lora_rank": 37, "q_lora_rank": 29, "qk_nope_head_dim": 7, "v_head_dim": 9},
    ),
}


class _Unabsorbed:
    """The attention block of layer 0 as the paper writes it, in double precision: every key and value expanded."""

    def __init__(self, path: Path, attention: LatentAttention, *, interleaved: bool) -> None:
        self._tensors = load_file(path / "model.safetensors")
        self._attention = attention
        self._interleaved = interleaved

    def output(self, x_TH: Array) -> Array:
        a = self._attention
        kv = self._compressed(x_TH)
        c_TC, shared_TR = kv[:, : a.kv_rank], kv[:, a.kv_rank :]
        heads = self._project(c_TC, "kv_b_proj").reshape(len(x_TH), a.num_heads, -1)
        queries = self._queries(x_TH)
        hidden = np.triu(np.ones((len(x_TH), len(x_TH)), bool), 1)
        outputs = []
        for head in range(a.num_heads):
            key = np.concatenate([heads[:, head, : a.plain_dim], shared_TR], axis=1)
            scores = queries[:, head] @ key.T / np.sqrt(a.plain_dim + a.rotary_dim)
            weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(axis=1, keepdims=True)))
            outputs.append(weights / weights.sum(axis=1, keepdims=True) @ heads[:, head, a.plain_dim :])
        return self._project(np.concatenate(outputs, axis=1), "o_proj")

    def _compressed(self, x_TH: Array) -> Array:
        """What is to be cached: the normed compressed vector, and the rotated key that all heads share."""
        kv = self._project(x_TH, "kv_a_proj_with_mqa")
        rank = self._attention.kv_rank
        return np.concatenate([self._norm(kv[:, :rank], "kv_a_layernorm"), self._rotate(kv[:, rank:])], axis=1)

    def _queries(self, x_TH: Array) -> Array:
        if self._attention.query_rank is None:
            flat = self._project(x_TH, "q_proj")
        else:
            flat = self._project(self._norm(self._project(x_TH, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
        heads = flat.reshape(len(x_TH), self._attention.num_heads, -1)
        plain = self._attention.plain_dim
        rotated = [self._rotate(heads[:, head, plain:]) for head in range(self._attention.num_heads)]
        return np.concatenate([heads[:, :, :plain], np.stack(rotated, axis=1)], axis=2)

    def _project(self, x: Array, name: str) -> Array:
        prefix = f"model.layers.0.self_attn.{name}"
        y: Array = x @ self._tensors[f"{prefix}.weight"].astype(np.float64).T
        return y + self._tensors[f"{prefix}.bias"] if f"{prefix}.bias" in self._tensors else y

    def _norm(self, x: Array, name: str) -> Array:
        weight = self._tensors[f"model.layers.0.self_attn.{name}.weight"].astype(np.float64)
        y: Array = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * weight
        return y

    def _rotate(self, x_TR: Array) -> Array:
        """Pairs as complex numbers, turned by position × frequency; first halves, then second halves."""
        num_pairs = x_TR.shape[1] // 2
        pairs = (
            x_TR[:, 0::2] + 1j * x_TR[:, 1::2] if self._interleaved else x_TR[:, :num_pairs] + 1j * x_TR[:, num_pairs:]
        )
        frequencies = 10_000.0 ** -(np.arange(num_pairs) / num_pairs)
        turned = pairs * np.exp(1j * np.arange(len(x_TR))[:, None] * frequencies)
        return np.concatenate([turned.real, turned.imag], axis=1)


class _Layer:
    """The attention block of layer 0 of a loaded checkpoint, with a store of its own."""

    def __init__(self, path: Path) -> None:
        decoder = load_decoder(path)
        self._block = decoder._layers[0].attention
        self._harness = Harness(decoder)
        self._rotary = RotaryTable(decoder.config.rope, decoder.config.attention.rotary_dim, torch.device("cpu"), 128)

    @torch.inference_mode()
    def run(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, H] and what is cached [T, C + R]."""
        plan = self._plan(len(x_TH))
        kv = self._harness.store.kv_LCSGD[0]
        output = self._block.forward(x_TH, Angles(self._rotary, plan.positions_T), plan, kv)
        return output, kv[0, plan.slots_T, 0]

    def _plan(self, num_tokens: int) -> ForwardPlan:
        whole = chunk([0] * num_tokens, 0, self._harness.blocks_for(num_tokens))
        return plan_forward([whole], self._harness.decoder.config, self._harness.store, self._harness.decoder.kernels)


@pytest.mark.parametrize("variant", _VARIANTS)
def test_it_equals_the_unabsorbed_form(variant: str, tmp_path: Path) -> None:
    family, overrides = _VARIANTS[variant]
    path = make_checkpoint(tmp_path / "m", family, overrides)
    attention = parse_config(path).attention
    assert isinstance(attention, LatentAttention)
    expected = _Unabsorbed(path, attention, interleaved=overrides.get("rope_interleave", True))
    x_TH = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)

    output, cached = _Layer(path).run(torch.from_numpy(x_TH))

    assert cached.shape == (50, attention.kv_rank + attention.rotary_dim)
    np.testing.assert_allclose(cached, expected._compressed(x_TH.astype(np.float64)), rtol=0, atol=2e-5)
    np.testing.assert_allclose(output, expected.output(x_TH.astype(np.float64)), rtol=0, atol=2e-5)


def test_only_one_vector_per_token_and_layer_is_cached(tmp_path: Path) -> None:
    harness = Harness(load_decoder(make_checkpoint(tmp_path / "m", "deepseek_v3", {})))
    # 4 layers, 1 plane, 1 head, 64 compressed and 8 rotated dimensions, 4 bytes each.
    assert harness.store.layout.token_bytes == 4 * (64 + 8) * 4
    assert harness.store.kv_LCSGD.shape[1::2] == (1, 1)


def _drawn(num_rows: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(0)
    weight_NIO = torch.from_numpy(random.standard_normal(shape, np.float32)).to(dtype)
    return torch.from_numpy(random.standard_normal((num_rows, *shape[:2]), np.float32)).to(dtype), weight_NIO


#: Heads, inputs, outputs: tiny, off any multiple, and of real proportions.
_SHAPES = [(1, 1, 1), (1, 8, 16), (2, 7, 5), (1, 16, 16), (5, 33, 47), (4, 16, 64), (4, 64, 16), (3, 128, 512)]


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_heads_row_is_the_same_among_any_number_of_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x_TNI, weight_NIO = _drawn(1000, shape, dtype)
    whole = per_head_product(x_TNI, weight_NIO)
    expected = torch.einsum("tni,nio->tno", x_TNI.double(), weight_NIO.double())
    torch.testing.assert_close(whole.double(), expected, rtol=0, atol=5e-4 if dtype == torch.float32 else 0.5)
    for size in (1, 2, 15, 16, 17, 100, 257, 700):
        parts = torch.cat([per_head_product(part, weight_NIO) for part in torch.split(x_TNI, size)])
        assert torch.equal(parts, whole), f"{size} rows at a time"


def test_small_products_take_the_kernel_of_large_ones() -> None:
    """16 rows are 3840 multiplications, 32 are more than 16³: it shows in one row of some thousands."""
    x_TNI, weight_NIO = _drawn(40_000, (1, 120, 2), torch.bfloat16)
    parts = torch.cat([per_head_product(part, weight_NIO) for part in torch.split(x_TNI, 16)])
    assert torch.equal(parts, per_head_product(x_TNI, weight_NIO))


def test_blockwise_fp8_weights_compute_like_their_dequantised_copy(tmp_path: Path) -> None:
    """Blocks of 128 are cut off at the edge of every weight: 160 and 200 are no multiples."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 160, "intermediate_size": 200, "kv_lora_rank": 136}
    packed, plain = tmp_path / "packed", make_checkpoint(tmp_path / "plain", "deepseek_v3", sizes)
    synthesize("deepseek_v3", "tiny", 0, sizes, packed, quantization=block_fp8())
    unquantised = solo_run(load_decoder(plain), range(40))
    with open_checkpoint(packed, block_fp8()) as files:
        stored = {name: files.read(name) for name in files.names()}
    kv_b = "model.layers.0.self_attn.kv_b_proj.weight"
    assert _stored_dtypes(packed)[kv_b] == "F8_E4M3"
    save_file({name: tensor.float().numpy() for name, tensor in stored.items()}, plain / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        got, expected = (solo_run(load_decoder(path, dtype), range(40)) for path in (packed, plain))
        assert torch.equal(got.logits, expected.logits)
        assert np.array_equal(got.rows, expected.rows)
        assert torch.equal(got.kv, expected.kv)
    assert not torch.equal(unquantised.logits, solo_run(load_decoder(packed), range(40)).logits)


def _stored_dtypes(path: Path) -> dict[str, str]:
    with CheckpointFiles(path) as files:
        return {name: files.dtype(name) for name in files.names()}
