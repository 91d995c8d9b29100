"""Queries, keys and values taken apart, against NumPy in double precision; and which slots of the cache are written."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.model.config import GroupedAttention, RopeConfig
from common.model.kernels.interface import Kernels
from common.model.rope import Angles, RotaryTable
from tests.unit.model.kernels.bounds import FP32, Bounded, Doubles, doubles, draw

_EPS = 1e-5
_NUM_SLOTS = 200
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Case:
    config: GroupedAttention
    dtype: torch.dtype
    num_tokens: int

    @property
    def norm_weight(self) -> torch.Tensor | None:
        if self.config.qk_norm is None:
            return None
        return draw(self.config.num_heads + self.config.num_kv_heads, self.config.head_dim, seed=3)

    @property
    def fused_TO(self) -> torch.Tensor:
        num_heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return draw(self.num_tokens, num_heads * self.config.head_dim, dtype=self.dtype)

    @property
    def slots_T(self) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(self.num_tokens).permutation(_NUM_SLOTS)[: self.num_tokens])

    @property
    def positions_T(self) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(1).integers(0, 500, self.num_tokens))

    def split(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, and the cache [C, S, G, D], NaN wherever nothing was written."""
        config = self.config
        heads = kernels.heads(config, self.norm_weight, _EPS, self.dtype)
        table = RotaryTable(RopeConfig(), config.rotary_dim, _CPU, 500)
        kv_CSGD = torch.full((2, _NUM_SLOTS, config.num_kv_heads, config.head_dim), float("nan"), dtype=self.dtype)
        q_TND = heads.split(self.fused_TO, Angles(table, self.positions_T), self.slots_T, kv_CSGD)
        return q_TND, kv_CSGD

    def expected(self) -> tuple[Bounded, Bounded, Doubles]:
        """Queries, keys, and values, which are copied and perhaps clipped."""
        config, bound = self.config, self.config.clip_qkv or np.inf
        heads = doubles(self.fused_TO).reshape(self.num_tokens, -1, config.head_dim)
        q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        if (weight := self.norm_weight) is not None:
            q, k = (_normed(part, config.qk_norm) for part in (q, k))
            q, k = q * doubles(weight)[: config.num_heads], k * doubles(weight)[config.num_heads :]
        queries, keys = (self._rotated(part.clip(-bound, bound)) for part in (q, k))
        queries = queries.scaled(np.array(np.float32(config.head_dim**-0.5)).astype(np.float64))
        return queries.rounded(self.dtype), keys.rounded(self.dtype), v.clip(-bound, bound)

    def _rotated(self, x_TND: Doubles) -> Bounded:
        """fp32 cosines of fp32 angles are what the table holds; what the rotation does with them is the test."""
        num_pairs = self.config.rotary_dim // 2
        frequencies = (1e4 ** -(np.arange(num_pairs, dtype=np.float32) * 2 / self.config.rotary_dim)).astype(np.float32)
        angles = (self.positions_T.numpy().astype(np.float32)[:, None] * frequencies).astype(np.float64)[:, None]
        turned = x_TND.copy()
        a, b = x_TND[..., :num_pairs], x_TND[..., num_pairs : 2 * num_pairs]
        turned[..., :num_pairs] = a * np.cos(angles) - b * np.sin(angles)
        turned[..., num_pairs : 2 * num_pairs] = b * np.cos(angles) + a * np.sin(angles)
        error = np.abs(x_TND)
        error[..., :num_pairs] = error[..., num_pairs : 2 * num_pairs] = np.abs(a) + np.abs(b)
        # A frequency that is off by one unit in the last place moves the angle by position times that.
        drift = np.zeros_like(error)
        drift[..., : 2 * num_pairs] = error[..., : 2 * num_pairs] * np.concatenate((angles, angles), axis=-1)
        num_summed = self.config.head_dim * (self.config.num_heads if self.config.qk_norm == "all" else 1)
        return Bounded(turned, 2 * FP32 * ((num_summed + 16) * error + 2 * drift))

    def check(self, kernels: Kernels) -> None:
        q_TND, kv_CSGD = self.split(kernels)
        q, k, v = self.expected()
        q.check(q_TND)
        k.check(kv_CSGD[0, self.slots_T])
        assert np.array_equal(doubles(kv_CSGD[1, self.slots_T]), v)
        others = np.setdiff1d(np.arange(_NUM_SLOTS), self.slots_T.numpy())
        assert kv_CSGD[:, others].isnan().all()


def _normed(x_TND: Doubles, over: str | None) -> Doubles:
    axes = (2,) if over == "head" else (1, 2)
    normed: Doubles = x_TND / np.sqrt((x_TND**2).mean(axis=axes, keepdims=True) + _EPS)
    return normed


@pytest.mark.parametrize("qk_norm", [None, "head", "all"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 32, 32), (6, 1, 18, 18), (3, 3, 20, 10), (8, 2, 64, 16), (2, 1, 128, 128), (1, 1, 2, 2)],
)
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_queries_keys_and_values(
    kernels: Kernels,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    qk_norm: str | None,
    clip: float | None,
    num_tokens: int,
) -> None:
    config = GroupedAttention(num_heads, num_kv_heads, head_dim, rotary_dim, qk_norm=qk_norm, clip_qkv=clip)  # type: ignore[arg-type]
    # Values of bf16 that are clipped at a number which bf16 holds stay exact.
    _Case(config, dtype, num_tokens).check(kernels)


def test_position_zero_does_not_turn(kernels: Kernels, dtype: torch.dtype) -> None:
    config = GroupedAttention(1, 1, 16, 16)
    heads = kernels.heads(config, None, _EPS, dtype)
    table = RotaryTable(RopeConfig(), 16, _CPU, 4)
    fused, kv = draw(1, 48, dtype=dtype), torch.zeros(2, 3, 1, 16, dtype=dtype)
    q = heads.split(fused, Angles(table, torch.tensor([0])), torch.tensor([2]), kv)
    assert torch.equal(q[0, 0], fused[0, :16] / 4)
    assert torch.equal(kv[0, 2, 0], fused[0, 16:32])
    assert torch.equal(kv[1, 2, 0], fused[0, 32:])
