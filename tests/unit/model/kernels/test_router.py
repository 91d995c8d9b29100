"""Routers: which experts they choose and how much each counts, against NumPy; and where the rows go.

Inputs pick columns of the weight, so that logits are known exactly, in bf16 as well as in fp32.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from common.model.config import RouterConfig
from common.model.kernels.interface import Kernels, Router
from common.model.kernels.native import NativeKernels
from common.routing.capture import RoutingCapture
from common.routing.record import RoutingLayout
from tests.unit.model.kernels.bounds import FP32, Doubles, doubles

#: Logits are multiples of this, up to ±4, which bf16 holds exactly. In a row of many experts some are equal.
_STEP = 1 / 16


def _logits(num_tokens: int, num_experts: int) -> Doubles:
    random = np.random.default_rng([num_tokens, num_experts])
    logits_TE: Doubles = np.asarray(random.integers(-64, 65, (num_tokens, num_experts)) * _STEP, np.float64)
    return logits_TE


def _correction(seed: int) -> Doubles:
    """Of 24 experts; far apart, so that no two of them are within rounding of each other."""
    correction_E: Doubles = np.asarray(np.random.default_rng(seed).permutation(24) * 0.037, np.float64)
    return correction_E


@dataclass(frozen=True)
class _Case:
    config: RouterConfig
    logits_TE: Doubles
    top_k: int
    bias_E: Doubles | None = None
    correction_E: Doubles | None = None

    def router(self, kernels: Kernels, dtype: torch.dtype) -> Router:
        return kernels.router(
            self.config,
            self.top_k,
            torch.from_numpy(self.logits_TE.T.copy()).to(dtype),
            None if self.bias_E is None else torch.from_numpy(self.bias_E).to(dtype),
            None if self.correction_E is None else torch.from_numpy(self.correction_E).float(),
            dtype,
        )

    def choose(self, kernels: Kernels, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return self.router(kernels, dtype).choose(torch.eye(len(self.logits_TE), dtype=dtype))

    def expected(self, token: int) -> tuple[list[int], list[float]]:
        """By the definition, in double precision."""
        config, logits_E = self.config, self.logits_TE[token] + (0 if self.bias_E is None else self.bias_E)
        scores_E = {
            "softmax": lambda: np.exp(logits_E) / np.exp(logits_E).sum(),
            "sigmoid": lambda: 1 / (1 + np.exp(-logits_E)),
            "chosen_softmax": lambda: logits_E,
        }[config.scoring]()
        ranking_E = scores_E + (0 if self.correction_E is None else self.correction_E)
        allowed = self._allowed(ranking_E)
        ids = sorted(allowed, key=lambda expert: (-ranking_E[expert], expert))[: self.top_k]
        weights = np.array([scores_E[expert] for expert in ids])
        if config.scoring == "chosen_softmax":
            weights = np.exp(weights) / np.exp(weights).sum()
        if config.normalize:
            weights = weights / (weights.sum() + config.normalize_eps)
        return ids, (weights * config.scale).tolist()

    def _allowed(self, ranking_E: Doubles) -> list[int]:
        groups = np.split(np.arange(len(ranking_E)), self.config.num_groups)
        scores = [sum(sorted(ranking_E[group])[-self.config.num_group_scores :]) for group in groups]
        best = sorted(range(len(groups)), key=lambda group: (-scores[group], group))[: self.config.num_groups_kept]
        return sorted(int(expert) for group in best for expert in groups[group])

    def check(self, kernels: Kernels, dtype: torch.dtype) -> None:
        ids, weights = self.choose(kernels, dtype)
        expected = [self.expected(token) for token in range(len(self.logits_TE))]
        assert ids.tolist() == [own for own, _ in expected]
        assert weights.dtype == torch.float32
        # Of a softmax: every term is rounded, and their sum.
        error = 2 * (self.logits_TE.shape[1] + 16) * FP32
        np.testing.assert_allclose(doubles(weights), [own for _, own in expected], rtol=error)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen_softmax"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (7, 3), (16, 1), (17, 4), (60, 8), (128, 8), (256, 2)])
def test_choice_and_weights(
    kernels: Kernels, dtype: torch.dtype, num_experts: int, top_k: int, scoring: str, normalize: bool
) -> None:
    config = RouterConfig(scoring, normalize, 1e-20 if normalize else 0.0, 2.5)  # type: ignore[arg-type]
    _Case(config, _logits(14, num_experts), top_k).check(kernels, dtype)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen_softmax"])
def test_equal_scores_go_to_the_lower_id(kernels: Kernels, dtype: torch.dtype, scoring: str) -> None:
    config = RouterConfig(scoring=scoring)  # type: ignore[arg-type]
    rows = np.array([[0.0, 3, 1, 3, 1, 1, 0, 3], [2.0] * 8, [0, 0, 0, 0, 0, 0, 0, 1], [-1e4, 5, -1e4, 5, 5, 5, 5, 5]])
    ids, _ = _Case(config, rows, 5).choose(kernels, dtype)
    assert ids.tolist() == [[1, 3, 7, 2, 4], [0, 1, 2, 3, 4], [7, 0, 1, 2, 3], [1, 3, 4, 5, 6]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_correction_decides_the_choice_but_not_the_weights(
    kernels: Kernels, dtype: torch.dtype, scoring: str
) -> None:
    config = RouterConfig(scoring, normalize=True, correction_bias=True)  # type: ignore[arg-type]
    _Case(config, _logits(10, 24), 6, correction_E=_correction(5)).check(kernels, dtype)


def test_a_bias_counts_in_the_choice_and_in_the_weights(kernels: Kernels, dtype: torch.dtype) -> None:
    bias = np.array([0.5, 0.0, -1.5, 4.0, 1.0, 0.25])
    config = RouterConfig(scoring="chosen_softmax", bias=True)
    # Their sums are exact in bf16, too.
    _Case(config, np.round(_logits(10, 6)), 3, bias_E=bias).check(kernels, dtype)


@pytest.mark.parametrize(("num_groups", "kept", "num_scores"), [(4, 1, 1), (4, 2, 2), (8, 3, 2), (3, 2, 1)])
@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
def test_experts_come_from_the_best_groups(
    kernels: Kernels, dtype: torch.dtype, num_groups: int, kept: int, num_scores: int, corrected: bool
) -> None:
    config = RouterConfig(
        "sigmoid", num_groups=num_groups, num_groups_kept=kept, num_group_scores=num_scores, correction_bias=corrected
    )
    correction = _correction(1) if corrected else None
    _Case(config, _logits(20, 24), 3, correction_E=correction).check(kernels, dtype)


def test_equal_groups_go_to_the_lower_one(kernels: Kernels, dtype: torch.dtype) -> None:
    config = RouterConfig("sigmoid", num_groups=3, num_groups_kept=1)
    ids, _ = _Case(config, np.array([[1.0, 0, 0, 1, 1, 0], [0, 0, 2, 1, 0, 2]]), 2).choose(kernels, dtype)
    assert ids.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen_softmax"])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_logits_that_are_no_numbers_still_give_legal_distinct_ids(
    kernels: Kernels, dtype: torch.dtype, scoring: str, num_groups: int
) -> None:
    """The engine reports such a forward pass; meanwhile nothing may read beside the experts."""
    config = RouterConfig(scoring, num_groups=num_groups, num_groups_kept=1)  # type: ignore[arg-type]
    router = _Case(config, _logits(4, 16), 4).router(kernels, dtype)
    x = torch.eye(4, dtype=dtype)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    ids, _ = router.choose(x)
    assert all(len(set(row)) == 4 and set(row) <= set(range(16)) for row in ids.tolist())


def test_one_token_that_is_no_number_leaves_the_others_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    case = _Case(RouterConfig(normalize=True), _logits(30, 40), 6)
    x = torch.eye(30, dtype=dtype)
    x[7, 7] = float("nan")
    rest = [token for token in range(30) if token != 7]
    ids, weights = case.router(kernels, dtype).choose(x[rest])
    all_ids, all_weights = case.router(kernels, dtype).choose(x)
    assert torch.equal(all_ids[rest], ids)
    assert torch.equal(all_weights[rest], weights)


@pytest.mark.parametrize(("num_experts", "id_bytes"), [(256, 1), (300, 2), (65_536, 2), (65_538, 4)])
def test_rows_are_written_as_wide_as_the_model_needs(
    kernels: Kernels, dtype: torch.dtype, num_experts: int, id_bytes: int
) -> None:
    """Into their own layer only; the highest ids need every byte."""
    logits = np.zeros((4, num_experts))
    for token in range(4):
        logits[token, [num_experts - 1 - token, 3 * token]] = 2.0, 1.0
    layout = RoutingLayout(3, 2, num_experts)
    capture = RoutingCapture(layout, 4, torch.device("cpu"))
    rows = capture.layer(1)
    assert rows.id_bytes == id_bytes
    case = _Case(RouterConfig(scoring="chosen_softmax"), logits, 2)
    ids, _ = case.router(kernels, dtype).choose(torch.eye(4, dtype=dtype), rows)
    expected = [[num_experts - 1 - token, 3 * token] for token in range(4)]
    assert ids.tolist() == expected
    taken = capture.take()
    assert taken.dtype == layout.dtype
    assert taken.tolist() == [[[0, 0], row, [0, 0]] for row in expected]


def test_a_router_in_fp32_tells_apart_what_bf16_would_not(kernels: Kernels) -> None:
    """Weights that are one in bf16, times an input that bf16 holds."""
    config = RouterConfig("sigmoid", fp32=True)
    order = np.random.default_rng(2).permutation(30)
    weight = torch.from_numpy(1 + order * 2.0**-14).float()[:, None].repeat(1, 2).contiguous()
    assert len(set(weight.bfloat16().flatten().tolist())) == 1
    router = kernels.router(config, 8, weight, None, None, torch.bfloat16)
    for num_tokens in (1, 13, 40):
        ids, weights = router.choose(torch.full((num_tokens, 2), 0.5).bfloat16())
        best = np.argsort(-order)[:8]
        assert ids.tolist() == [best.tolist()] * num_tokens
        expected = 1 / (1 + np.exp(-(1 + order[best] * 2.0**-14)))
        np.testing.assert_allclose(doubles(weights), [expected] * num_tokens, rtol=1e-6)


def test_native_ids_are_of_the_type_that_experts_read(kernels: Kernels, dtype: torch.dtype) -> None:
    case = _Case(RouterConfig(), _logits(2, 8), 2)
    ids, _ = case.choose(kernels, dtype)
    assert ids.dtype == (torch.int32 if isinstance(kernels, NativeKernels) else torch.int64)
    other, _ = replace(case, config=RouterConfig(scale=2.0)).choose(kernels, dtype)
    assert torch.equal(ids, other)
