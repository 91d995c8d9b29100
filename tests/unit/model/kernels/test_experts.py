"""Experts against NumPy in double precision: who computes which rows, activations, biases, the sum of the chosen."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest
import torch

from common.model.config import ExpertsConfig
from common.model.kernels.interface import Experts, Kernels
from tests.unit.model.kernels.bounds import FP32, Bounded, draw, gated

_ALPHA, _LIMIT = 1.702, 0.8
_SWIGLU: Final = "swiglu"
_CLAMPED: Final = "clamped_swiglu"


@dataclass(frozen=True)
class _Layer:
    """Weights of some experts as a checkpoint has them."""

    config: ExpertsConfig
    gate_up: list[torch.Tensor]
    down: list[torch.Tensor]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @classmethod
    def draw(
        cls, dtype: torch.dtype, num_experts: int, hidden: int, width: int, *, bias: bool = False, clamped: bool = False
    ) -> "_Layer":
        config = ExpertsConfig(num_experts, width, bias, _CLAMPED if clamped else _SWIGLU, _ALPHA, _LIMIT)
        return cls(
            config,
            list(draw(num_experts, 2 * width, hidden, dtype=dtype)),
            list(draw(num_experts, hidden, width, dtype=dtype)),
            draw(num_experts, 2 * width, dtype=dtype) if bias else None,
            draw(num_experts, hidden, dtype=dtype) if bias else None,
        )

    def packed(self, kernels: Kernels) -> Experts:
        return kernels.experts(
            self.config,
            [kernels.pack(weight, fused=True) for weight in self.gate_up],
            [kernels.pack(weight) for weight in self.down],
            self.gate_up_bias,
            self.down_bias,
        )

    def expert(self, index: int, x: Bounded) -> Bounded:
        """One expert's output, as it is stored before it is weighed."""
        width, weight = self.config.size, self.gate_up[index]
        bias = None if self.gate_up_bias is None else self.gate_up_bias[index]
        gate = x.linear(weight[:width], None if bias is None else bias[:width])
        up = x.linear(weight[width:], None if bias is None else bias[width:])
        if self.config.activation == _CLAMPED:
            up = up.clipped(-_LIMIT, _LIMIT).plus(Bounded.exact(torch.ones(1)))
            middle = gated(gate.clipped(-np.inf, _LIMIT), up, _ALPHA)
        else:
            middle = gated(gate, up)
        bias = None if self.down_bias is None else self.down_bias[index]
        return middle.rounded(weight.dtype).linear(self.down[index], bias)

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Bounded:
        parts = []
        for token, (own_ids, own_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            row = Bounded.exact(x[token : token + 1])
            chosen = [
                self.expert(index, row).scaled(np.array(weight))
                for index, weight in zip(own_ids, own_weights, strict=True)
            ]
            value, error = (np.stack([getattr(part, name) for part in chosen]) for name in ("value", "error"))
            added = 2 * len(chosen) * FP32 * np.abs(value).sum(axis=0)
            parts.append(Bounded(value.sum(axis=0), error.sum(axis=0) + added))
        value, error = (np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "error"))
        return Bounded(value, error).rounded(x.dtype)


def _choice(num_tokens: int, top_k: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts per token, in random order, and positive weights."""
    random = np.random.default_rng([num_tokens, top_k, num_experts])
    ids = np.stack([random.permutation(num_experts)[:top_k] for _ in range(num_tokens)]).astype(np.int32)
    return torch.from_numpy(ids), torch.from_numpy(random.random((num_tokens, top_k), np.float32))


@pytest.mark.parametrize("top_k", range(1, 9))
def test_the_weighted_sum_of_the_chosen(kernels: Kernels, dtype: torch.dtype, top_k: int) -> None:
    """With few tokens most experts are chosen by nobody."""
    layer = _Layer.draw(dtype, 12, 64, 48)
    experts = layer.packed(kernels)
    for num_tokens in (1, 2, 9):
        x, (ids, weights) = draw(num_tokens, 64, dtype=dtype), _choice(num_tokens, top_k, 12)
        layer.expected(x, ids, weights).check(experts(x, ids, weights))


@pytest.mark.parametrize("clamped", [False, True], ids=[_SWIGLU, _CLAMPED])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("hidden", "width"), [(2, 2), (30, 18), (64, 16), (76, 34), (50, 130)])
def test_sizes_that_fill_no_panel(
    kernels: Kernels, dtype: torch.dtype, hidden: int, width: int, bias: bool, clamped: bool
) -> None:
    layer = _Layer.draw(dtype, 7, hidden, width, bias=bias, clamped=clamped)
    x, (ids, weights) = draw(14, hidden, dtype=dtype), _choice(14, 3, 7)
    layer.expected(x, ids, weights).check(layer.packed(kernels)(x, ids, weights))


@pytest.mark.parametrize("num_tokens", [1, 12, 13, 30, 70])
def test_one_expert_that_all_choose(kernels: Kernels, dtype: torch.dtype, num_tokens: int) -> None:
    layer = _Layer.draw(dtype, 5, 34, 20, bias=True)
    x, ids, weights = draw(num_tokens, 34, dtype=dtype), torch.full((num_tokens, 1), 3).int(), torch.ones(num_tokens, 1)
    layer.expected(x, ids, weights).check(layer.packed(kernels)(x, ids, weights))


def test_outputs_are_added_in_the_order_of_the_choice(kernels: Kernels) -> None:
    """In fp32 (2²⁵ + 1) - 2²⁵ is 0, and any other order gives 1: experts that give 2²⁵, 1 and -2²⁵, in two orders."""
    big, one = 2.0**25, 1.0
    gate_up = [torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]) for _ in range(3)]
    down = [torch.eye(2) * factor for factor in (big, one, -big)]
    layer = _Layer(ExpertsConfig(3, 2), gate_up, down)
    experts = layer.packed(kernels)
    x = torch.tensor([[64.0, 1 / 64]])  # silu(64) · (1 / 64) = 1
    for ids, expected in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0)):
        actual = experts(x, torch.tensor([ids]).int(), torch.ones(1, 3))
        assert actual.tolist() == [[expected, expected]]


def test_an_expert_that_nobody_chose_is_not_computed(kernels: Kernels, dtype: torch.dtype) -> None:
    """Its weights may be anything."""
    layer = _Layer.draw(dtype, 4, 32, 16)
    x, ids, weights = draw(6, 32, dtype=dtype), torch.tensor([[0, 3]] * 6).int(), torch.full((6, 2), 0.5)
    clean = layer.packed(kernels)(x, ids, weights)
    layer.gate_up[1].fill_(float("nan"))
    layer.down[2].fill_(float("nan"))
    assert torch.equal(layer.packed(kernels)(x, ids, weights), clean)
