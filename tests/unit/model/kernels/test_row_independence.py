"""A row's bits are its own: alone, among the first n rows, or in any place, with one thread or two.

All counts up to 70 go through every remainder of the tiles' sizes; sizes are no multiples of a panel or a register.
"""

from collections.abc import Callable

import pytest
import torch

from common.model.config import ExpertsConfig, GroupedAttention, RopeConfig, RouterConfig
from common.model.kernels.interface import Kernels
from common.model.rope import Angles, RotaryTable
from tests.unit.model.kernels.bounds import draw
from tests.unit.model.kernels.paged import Heads, PagedCache

pytestmark = pytest.mark.usefixtures("num_threads")

_NUM_ROWS = 70
_SINGLE = (0, 1, 11, 12, 13, 35, 47, 48, 69)

#: Rows by index to their results.
Compute = Callable[[torch.Tensor], torch.Tensor]


def _check(compute: Compute) -> None:
    """Every prefix, some rows alone, and a part from the middle in reverse order give what all rows together do."""
    everything = torch.arange(_NUM_ROWS)
    expected = compute(everything)
    assert expected.isfinite().all()
    parts = [everything[:count] for count in range(1, _NUM_ROWS)] + [everything[row : row + 1] for row in _SINGLE]
    for part in [*parts, everything[9:52].flip(0)]:
        different = (compute(part) != expected[part]).flatten(1).any(dim=1)
        assert not different.any(), f"{len(part)} rows from {part[0]}: rows {part[different].tolist()} differ"


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 2), (37, 30), (16, 1026), (130, 76), (300, 4098)])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_products(kernels: Kernels, dtype: torch.dtype, num_outputs: int, num_inputs: int, with_bias: bool) -> None:
    bias = draw(num_outputs, dtype=dtype) if with_bias else None
    linear = kernels.linear(kernels.pack(draw(num_outputs, num_inputs, dtype=dtype)), bias)
    x = draw(_NUM_ROWS, num_inputs, dtype=dtype)
    _check(lambda rows: linear(x[rows]))


@pytest.mark.parametrize(("hidden", "width"), [(76, 38), (130, 18)])
def test_gated_blocks(kernels: Kernels, dtype: torch.dtype, hidden: int, width: int) -> None:
    gate_up, down = draw(2 * width, hidden, dtype=dtype), draw(hidden, width, dtype=dtype)
    block = kernels.gated(kernels.pack(gate_up, fused=True), kernels.pack(down))
    x = draw(_NUM_ROWS, hidden, dtype=dtype)
    _check(lambda rows: block(x[rows]))


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_experts(kernels: Kernels, dtype: torch.dtype, activation: str, top_k: int) -> None:
    """One of them is chosen by most, so that it computes many rows too."""
    num_experts, hidden, width = 7, 76, 38
    config = ExpertsConfig(num_experts, width, True, activation, 1.702, 0.8)  # type: ignore[arg-type]
    experts = kernels.experts(
        config,
        [kernels.pack(weight, fused=True) for weight in draw(num_experts, 2 * width, hidden, dtype=dtype)],
        [kernels.pack(weight) for weight in draw(num_experts, hidden, width, dtype=dtype)],
        draw(num_experts, 2 * width, dtype=dtype),
        draw(num_experts, hidden, dtype=dtype),
    )
    x, scores = draw(_NUM_ROWS, hidden, dtype=dtype), draw(_NUM_ROWS, num_experts)
    scores[:, 2] += 2
    weights, ids = scores.softmax(dim=1).topk(top_k)
    _check(lambda rows: experts(x[rows], ids[rows].int(), weights[rows].contiguous()))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "chosen_softmax"])
@pytest.mark.parametrize("fp32", [False, True], ids=["", "router-in-fp32"])
def test_routers(kernels: Kernels, dtype: torch.dtype, scoring: str, fp32: bool) -> None:
    weight = draw(37, 76, dtype=torch.float32 if fp32 else dtype)
    router = kernels.router(RouterConfig(scoring, normalize=True), 5, weight, None, None, dtype)  # type: ignore[arg-type]
    x = draw(_NUM_ROWS, 76, dtype=dtype)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        ids, weights = router.choose(x[rows])
        return torch.cat((ids.float(), weights), dim=1)

    _check(compute)


@pytest.mark.parametrize("qk_norm", [None, "head", "all"])
def test_heads(kernels: Kernels, dtype: torch.dtype, qk_norm: str | None) -> None:
    """Queries, and what is written into the cache."""
    config = GroupedAttention(3, 1, 18, 10, qk_norm=qk_norm, clip_qkv=2.0)  # type: ignore[arg-type]
    heads = kernels.heads(config, None if qk_norm is None else draw(4, 18), 1e-6, dtype)
    table = RotaryTable(RopeConfig(), 10, torch.device("cpu"), _NUM_ROWS)
    fused = draw(_NUM_ROWS, 5 * 18, dtype=dtype)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        kv_CSGD = torch.zeros(2, _NUM_ROWS, 1, 18, dtype=dtype)
        q_TND = heads.split(fused[rows], Angles(table, rows), rows, kv_CSGD)
        return torch.cat((q_TND, *kv_CSGD[:, rows]), dim=1)

    _check(compute)


@pytest.mark.parametrize("size", [2, 76, 2050])
def test_norms(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    x, delta, weight = (
        draw(_NUM_ROWS, size, dtype=dtype),
        draw(_NUM_ROWS, size, dtype=dtype, seed=1),
        draw(size).to(dtype),
    )
    _check(lambda rows: kernels.add_norm(x[rows], delta[rows], weight, 1e-6))


#: Positions around multiples of 16, 128 and 256: panels, and tiles of both kinds.
_LENGTHS = (1, 2, 16, 17, 63, 64, 65, 96, 97, 126, 127, 128, 129, 130, 192, 193, 255, 256, 257, 300)
_SHAPES = [Heads(), Heads(5, 1, 22, value_dim=18), Heads(8, 8, 64, block_size=4), Heads(50, 1, 6)]


@pytest.mark.parametrize("heads", _SHAPES, ids=["grouped", "one-plane", "one-to-one", "many-to-one"])
@pytest.mark.parametrize(
    ("window", "with_sinks"), [(None, False), (None, True), (1, False), (20, True), (64, False), (100, True)]
)
def test_attention(kernels: Kernels, dtype: torch.dtype, heads: Heads, window: int | None, with_sinks: bool) -> None:
    """A position alone, in chunks of all kinds, and beside other sequences."""
    if kernels.name == "torch" and torch.get_num_threads() > 1 and heads != _SHAPES[0]:
        pytest.skip("threads that share cores with other tests take minutes over small batched products")
    cache = PagedCache(kernels, dtype, heads, num_slots=2048)
    sinks_N = draw(heads.num_heads) if with_sinks else None
    sequence, longer, other = cache.sequence(300), cache.sequence(400), cache.sequence(90)
    (expected,) = cache.attend([sequence.tokens(0, 300)], window=window, sinks_N=sinks_N)
    assert expected.isfinite().all()
    company = [longer.tokens(399, 400)]
    for length in _LENGTHS:
        own = sequence.tokens(length - 1, length)
        (alone,) = cache.attend([own], window=window, sinks_N=sinks_N)
        assert torch.equal(alone[0], expected[length - 1]), f"position {length - 1} alone"
        _, beside, _ = cache.attend([*company, own, other.tokens(20, 90)], window=window, sinks_N=sinks_N)
        assert torch.equal(beside[0], expected[length - 1]), f"position {length - 1} beside others"
    for start in (0, 5, 63, 120, 127, 128, 129, 250):
        for size in (2, 8, 9, 16, 23, 24, 25, 48, 49, 50):
            (chunk,) = cache.attend([sequence.tokens(start, start + size)], window=window, sinks_N=sinks_N)
            assert torch.equal(chunk, expected[start : start + size]), f"{size} from {start}"
    batch = [*company, other.tokens(89, 90), sequence.tokens(100, 170), other.tokens(30, 89)]
    assert torch.equal(cache.attend(batch, window=window, sinks_N=sinks_N)[2], expected[100:170])
