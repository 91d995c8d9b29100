"""Products and feed-forward blocks against NumPy in double precision, and the layout that weights are packed in."""

import numpy as np
import pytest
import torch

from common.model import native
from common.model.kernels.interface import Kernels, PackedWeight
from common.model.kernels.native import NativeKernels
from tests.unit.model.kernels.bounds import Bounded, Doubles, doubles, draw, gated

#: Outputs around multiples of a panel, and of a pair of them.
_NUM_OUTPUTS = (1, 15, 16, 17, 31, 32, 33, 50)


@pytest.mark.parametrize("num_rows", [1, 2, 13, 70])
@pytest.mark.parametrize("num_inputs", [2, 30, 1024, 4098])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_a_product(kernels: Kernels, dtype: torch.dtype, num_inputs: int, num_rows: int, with_bias: bool) -> None:
    x = draw(num_rows, num_inputs, dtype=dtype)
    for num_outputs in _NUM_OUTPUTS:
        weight = draw(num_outputs, num_inputs, dtype=dtype)
        bias = draw(num_outputs, dtype=dtype) if with_bias else None
        actual = kernels.linear(kernels.pack(weight), bias)(x)
        assert actual.dtype == dtype
        Bounded.exact(x).linear(weight, bias).check(actual)


@pytest.mark.parametrize("name", [name for name in native.available() if name != "avx512_bf16"])
@pytest.mark.parametrize("num_rows", [1, 13])
@pytest.mark.parametrize("num_inputs", [2, 30, 256, 258, 4098])
def test_pairs_are_added_one_by_one_the_upper_half_first(name: str, num_inputs: int, num_rows: int) -> None:
    """The order of vdpbf16ps, whatever a register holds. A product of two bf16 is exact in fp32."""
    x, weight = (draw(rows, num_inputs, dtype=torch.bfloat16) for rows in (num_rows, 50))
    inputs, columns = x.float().numpy(), weight.float().numpy()
    sums = np.zeros((num_rows, 50), np.float32)
    for pair in range(0, num_inputs, 2):
        for i in (pair + 1, pair):
            sums += inputs[:, i, None] * columns[:, i]
    kernels = NativeKernels(name)
    assert torch.equal(kernels.linear(kernels.pack(weight))(x), torch.from_numpy(sums).bfloat16())


def test_rows_may_lie_apart(kernels: Kernels, dtype: torch.dtype) -> None:
    """As the parts of a fused product do."""
    whole, weight = draw(9, 100, dtype=dtype), draw(20, 36, dtype=dtype)
    part = whole[:, 30:66]
    linear = kernels.linear(kernels.pack(weight))
    assert torch.equal(linear(part), linear(part.contiguous()))
    Bounded.exact(part).linear(weight).check(linear(part))


@pytest.mark.parametrize("num_outputs", _NUM_OUTPUTS)
@pytest.mark.parametrize("num_inputs", [2, 30, 32, 34, 1024])
def test_the_identity_gives_a_packed_weight_back(
    kernels: Kernels, dtype: torch.dtype, num_inputs: int, num_outputs: int
) -> None:
    weight = draw(num_outputs, num_inputs, dtype=dtype)
    identity = torch.eye(num_inputs, dtype=dtype)
    assert torch.equal(kernels.linear(kernels.pack(weight))(identity), weight.T)


def _unpacked(packed: PackedWeight, num_parts: int) -> torch.Tensor:
    """By the documented layout: [N / 16][K / W][16][W], a word of W inputs being 4 bytes; parts take turns by panel."""
    per_word = 4 // packed.data.itemsize
    panels = packed.data.view(-1, packed.num_inputs // per_word, 16, per_word)
    rows = panels.transpose(1, 2).reshape(-1, num_parts, 16, packed.num_inputs).transpose(0, 1)
    return rows.reshape(num_parts, -1, packed.num_inputs)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(2, 2), (34, 30), (64, 128), (70, 66)])
def test_the_layout_of_native_weights(
    kernels: Kernels, dtype: torch.dtype, num_outputs: int, num_inputs: int, fused: bool
) -> None:
    if not isinstance(kernels, NativeKernels):
        pytest.skip("torch packs weights as it likes")
    weight = draw(num_outputs, num_inputs, dtype=dtype)
    num_parts = 2 if fused else 1
    found = _unpacked(kernels.pack(weight, fused=fused), num_parts)
    size = num_outputs // num_parts
    assert torch.equal(found[:, :size].reshape(num_outputs, num_inputs), weight)
    assert not found[:, size:].any()


def test_packing_leaves_no_reference_to_a_weight_that_it_copied(kernels: Kernels, dtype: torch.dtype) -> None:
    weight = draw(40, 64, dtype=dtype)
    x, packed = draw(3, 64, dtype=dtype), kernels.pack(weight)
    before = kernels.linear(packed)(x)
    copies = kernels.copies(weight)
    weight.zero_()
    assert torch.equal(kernels.linear(packed)(x), before) == copies


@pytest.mark.parametrize(("hidden", "width"), [(2, 2), (30, 18), (64, 34), (130, 62), (76, 256)])
@pytest.mark.parametrize("num_rows", [1, 12, 37])
def test_a_gated_block(kernels: Kernels, dtype: torch.dtype, hidden: int, width: int, num_rows: int) -> None:
    x = draw(num_rows, hidden, dtype=dtype)
    gate_up, down = draw(2 * width, hidden, dtype=dtype), draw(hidden, width, dtype=dtype)
    block = kernels.gated(kernels.pack(gate_up, fused=True), kernels.pack(down))
    rows = Bounded.exact(x)
    middle = gated(rows.linear(gate_up[:width]), rows.linear(gate_up[width:])).rounded(dtype)
    middle.linear(down).check(block(x))


@pytest.mark.parametrize("gate", [-1e4, -100.0, -88.0, 0.0, 88.0, 1e4])
def test_a_gate_far_from_zero_is_neither_nan_nor_infinite(kernels: Kernels, dtype: torch.dtype, gate: float) -> None:
    # Two gate rows, then two up rows that give 1.
    gate_up = torch.tensor([[gate, 0.0], [gate, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    block = kernels.gated(kernels.pack(gate_up, fused=True), kernels.pack(torch.eye(2, dtype=dtype)))
    passed = max(float(gate_up[0, 0]), 0.0)  # e⁻⁸⁸ of a gate is nothing beside it
    actual = block(torch.tensor([[1.0, 0.0]], dtype=dtype))
    np.testing.assert_allclose(doubles(actual), [[passed, passed]], rtol=2**-7, atol=1e-34)


def test_sums_are_taken_in_fp32(kernels: Kernels) -> None:
    """4096 times 1 + 2⁻⁷ is 4128; sums kept in bf16 would stand still at 256."""
    x, weight = torch.full((1, 4096), 1.0078125).bfloat16(), torch.ones(16, 4096).bfloat16()
    product = kernels.linear(kernels.pack(weight))(x)
    assert np.array_equal(doubles(product), _nearest(np.full((1, 16), 4128.0)))


def _nearest(values: Doubles) -> Doubles:
    return doubles(torch.from_numpy(values).bfloat16())


@pytest.mark.parametrize("kind", [float("nan"), float("inf")])
def test_a_bad_row_does_not_touch_the_others(kernels: Kernels, dtype: torch.dtype, kind: float) -> None:
    x, weight = draw(14, 64, dtype=dtype), draw(40, 64, dtype=dtype)
    linear = kernels.linear(kernels.pack(weight))
    clean = linear(x)
    x[3, 5] = kind
    spoilt = linear(x)
    assert not spoilt[3].isfinite().any()
    others = [row for row in range(14) if row != 3]
    assert torch.equal(spoilt[others], clean[others])
