"""The MoE block against a NumPy recomputation, and the order of its choices."""

from functools import partial

import numpy as np
import pytest
import torch

from common.model.config import RouterConfig
from common.model.feed_forward import MoeFeedForward
from common.model.layers import clamped_swiglu
from common.model.moe import Dispatch, TorchExperts, combine
from common.model.router import TorchRouter


def _draw(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(list(shape)).standard_normal(shape, np.float32))


def _router_with_logits(rows: list[list[float]], top_k: int, *, norm: bool = True) -> tuple[TorchRouter, torch.Tensor]:
    """A router whose logits for the returned input are exactly `rows`: one-hot inputs pick columns of the weight."""
    router = TorchRouter(RouterConfig(normalize=norm), top_k, torch.tensor(rows).T.contiguous())
    return router, torch.eye(len(rows))


def test_experts_come_by_descending_score_and_ties_go_to_the_lower_id() -> None:
    router, x = _router_with_logits([[0.0, 3.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]], top_k=3)
    ids, _ = router.choose(x)
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2]]


@pytest.mark.parametrize(("norm", "expected"), [(True, [0.75, 0.25]), (False, [0.6, 0.2])])
def test_weights_are_probabilities_renormalised_on_demand(norm: bool, expected: list[float]) -> None:
    router, x = _router_with_logits([np.log([0.2, 0.1, 0.6, 0.1]).tolist()], top_k=2, norm=norm)
    ids, weights = router.choose(x)
    assert ids.tolist() == [[2, 0]]
    np.testing.assert_allclose(weights.numpy(), [expected], rtol=1e-5)


def test_chosen_softmax_ranks_biased_logits_and_weighs_the_chosen_alone() -> None:
    rows = [[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.0, 0.0]]
    config = RouterConfig(scoring="chosen_softmax", bias=True)
    bias = torch.tensor([0.5, 0.0, -1.5, 4.0])
    router = TorchRouter(config, 2, torch.tensor(rows).T.contiguous(), bias)
    ids, weights = router.choose(torch.eye(2))
    # Biased logits: 0.5, 1, 0.5, 3 and 3.5, 0, -1.5, 4.
    assert ids.tolist() == [[3, 1], [3, 0]]
    high, close = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-0.5))
    np.testing.assert_allclose(weights.numpy(), [[high, 1 - high], [close, 1 - close]], rtol=1e-6)


def test_chosen_softmax_gives_ties_to_the_lower_id_and_survives_large_logits() -> None:
    router = TorchRouter(
        RouterConfig(scoring="chosen_softmax"), 3, torch.tensor([[-500.0, 800.0, 800.0, 90.0, 800.0]]).T
    )
    ids, weights = router.choose(torch.ones(1, 1))
    assert ids.tolist() == [[1, 2, 4]]
    np.testing.assert_allclose(weights.numpy(), [[1 / 3] * 3], rtol=1e-6)


def test_dispatch_groups_rows_by_expert_and_brings_them_back() -> None:
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]])
    dispatch = Dispatch.plan(ids, num_experts=5)
    assert dispatch.counts == [2, 0, 2, 2, 0]
    x = torch.tensor([[10.0], [20.0], [30.0]])
    assert dispatch.scatter(x).flatten().tolist() == [10, 20, 10, 30, 20, 30]
    assert dispatch.gather(dispatch.scatter(x)).squeeze(-1).tolist() == [[10, 10], [20, 20], [30, 30]]


def test_combine_adds_in_top_k_order() -> None:
    # In fp32 (2**25 + 1) - 2**25 is 0, so another order would give 1.
    y = torch.tensor([[[2.0**25], [1.0], [-(2.0**25)]]])
    assert combine(y, torch.ones(1, 3)).item() == 0.0


def test_the_block_is_the_weighted_sum_of_its_experts() -> None:
    num_experts, hidden, width, num_tokens = 6, 20, 12, 9
    gate_up, down = _draw(num_experts, 2 * width, hidden), _draw(num_experts, hidden, width)
    router = TorchRouter(RouterConfig(normalize=True), 3, _draw(num_experts, hidden))
    block = MoeFeedForward(router, TorchExperts(list(gate_up), list(down)))
    x = _draw(num_tokens, hidden)
    ids, weights = router.choose(x)
    expected = np.zeros((num_tokens, hidden))
    for token in range(num_tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = np.split(gate_up[expert].double().numpy() @ x[token].double().numpy(), 2)
            expected[token] += weight * (down[expert].double().numpy() @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(block.forward(x, None).numpy(), expected, rtol=1e-3, atol=1e-4)


def test_each_expert_adds_its_own_biases() -> None:
    num_experts, hidden, width = 5, 20, 12
    gate_up, down = _draw(num_experts, 2 * width, hidden), _draw(num_experts, hidden, width)
    gate_up_bias, down_bias = _draw(num_experts, 2 * width), _draw(num_experts, hidden)
    activate = partial(clamped_swiglu, alpha=1.702, limit=0.8)
    experts = TorchExperts(list(gate_up), list(down), activate, gate_up_bias, down_bias)
    counts = [2, 0, 3, 0, 1]  # experts 1 and 3 have no rows, and their biases must not move up
    x = _draw(6, hidden)
    expected = np.empty((6, hidden))
    for row, expert in enumerate([0, 0, 2, 2, 2, 4]):
        fused = gate_up[expert].double().numpy() @ x[row].double().numpy() + gate_up_bias[expert].double().numpy()
        gate, up = np.minimum(fused[:width], 0.8), np.clip(fused[width:], -0.8, 0.8)
        inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        expected[row] = down[expert].double().numpy() @ inner + down_bias[expert].double().numpy()
    np.testing.assert_allclose(experts.forward(x, counts).numpy(), expected, rtol=1e-3, atol=1e-4)
