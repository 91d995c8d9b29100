"""The rotary table: as long as it must be, and the same numbers however long it is and whatever else is looked up."""

import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.model.config import RopeConfig
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.rope import RotaryTable, interleaved_rows, rotary_digest, rotary_frequencies, rotate
from common.model.rope_scaling import DynamicScaling, LinearScaling, LongScaling, RopeScaling, YarnScaling
from common.model.synthesize import synthesize

CPU = torch.device("cpu")
#: Tables are computed in slabs of 8192 positions; lengths around the edges, and a far position.
LENGTHS = (1, 2, 17, 8191, 8192, 8193, 20_000)
ROPE = RopeConfig(theta=1e6)
ROTARY_DIM = 32
DYNAMIC = RopeConfig(theta=1e6, scaling=DynamicScaling(factor=2.0, original_length=4096))
LONG = RopeConfig(theta=1e6, scaling=LongScaling(4096, tuple([1.0] * 16), tuple([8.0] * 16)), attention_factor=1.2)


def table(num_positions: int, rope: RopeConfig = ROPE) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    cos, sin = RotaryTable(rope, ROTARY_DIM, CPU, num_positions).look_up(torch.arange(num_positions))
    return cos.squeeze(1).numpy(), sin.squeeze(1).numpy()


@pytest.mark.parametrize("num_positions", LENGTHS)
def test_values_are_those_of_the_whole_formula_bit_for_bit(num_positions: int) -> None:
    exponents = torch.arange(0, ROTARY_DIM, 2, dtype=torch.float32) / ROTARY_DIM
    frequencies = (1.0 / (1e6**exponents)).numpy()
    angles = np.arange(max(LENGTHS), dtype=np.float32)[:, None] * frequencies
    cos, sin = table(num_positions)
    assert cos.tobytes() == np.cos(angles.astype(np.float64)).astype(np.float32)[:num_positions].tobytes()
    assert sin.tobytes() == np.sin(angles.astype(np.float64)).astype(np.float32)[:num_positions].tobytes()


def test_attention_factor_multiplies_cosine_and_sine() -> None:
    cos, sin = table(100, RopeConfig(theta=1e6, scaling=YarnScaling(4.0, 4096), attention_factor=1.25))
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-6)


@pytest.mark.parametrize("positions", [[0], [19], [5, 5, 5], list(range(20)), list(range(19, -1, -1)), [3, 17]])
@pytest.mark.parametrize("rope", [ROPE, DYNAMIC, LONG])
def test_a_look_up_does_not_depend_on_what_else_is_looked_up(rope: RopeConfig, positions: list[int]) -> None:
    whole_cos, whole_sin = table(20, rope)
    cos, sin = RotaryTable(rope, ROTARY_DIM, CPU, 20).look_up(torch.tensor(positions))
    assert cos.shape == sin.shape == (len(positions), 1, ROTARY_DIM // 2)
    assert cos.numpy().tobytes() == whole_cos[positions].tobytes()
    assert sin.numpy().tobytes() == whole_sin[positions].tobytes()


def test_dynamic_scaling_raises_the_base_beyond_the_original_length() -> None:
    """By the published formula: base * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))."""
    exponents = np.arange(0, ROTARY_DIM, 2) / ROTARY_DIM
    frequencies = rotary_frequencies(DYNAMIC, ROTARY_DIM, 3 * 4096).numpy()
    np.testing.assert_allclose(frequencies, (1e6 * 5.0 ** (32 / 30)) ** -exponents, rtol=1e-6)
    assert torch.equal(rotary_frequencies(DYNAMIC, ROTARY_DIM, 4096), rotary_frequencies(ROPE, ROTARY_DIM, 4096))


def test_longrope_takes_its_long_factors_beyond_the_original_length() -> None:
    unscaled = rotary_frequencies(ROPE, ROTARY_DIM, 1)
    assert torch.equal(rotary_frequencies(LONG, ROTARY_DIM, 4096), unscaled)
    assert torch.equal(rotary_frequencies(LONG, ROTARY_DIM, 4097), unscaled / 8)


@pytest.mark.parametrize(
    ("scaling", "depends"),
    [(None, False), (LinearScaling(2.0), False), (DYNAMIC.scaling, True), (LONG.scaling, True)],
)
def test_digests_differ_only_where_lengths_change_the_rotation(scaling: RopeScaling | None, depends: bool) -> None:
    rope = RopeConfig(scaling=scaling)
    assert rotary_digest(rope, ROTARY_DIM, 100) == rotary_digest(rope, ROTARY_DIM, 4096)
    assert (rotary_digest(rope, ROTARY_DIM, 4096) != rotary_digest(rope, ROTARY_DIM, 8192)) == depends
    assert rotary_digest(rope, ROTARY_DIM, 100) != rotary_digest(RopeConfig(2e4, scaling), ROTARY_DIM, 100)
    assert rotary_digest(rope, ROTARY_DIM, 100) != rotary_digest(RopeConfig(1e4, scaling, 1.1), ROTARY_DIM, 100)


def test_rotation_turns_the_leading_pairs_and_passes_the_rest() -> None:
    """By hand: a quarter turn takes (a, b) to (-b, a)."""
    x_TND = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    assert rotate(x_TND, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0, 5.0, 6.0]]]


def test_interleaved_rows_bring_the_first_of_each_pair_first() -> None:
    assert interleaved_rows(8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_long_table_needs_little_more_than_itself() -> None:
    num_positions = 300_000
    tracemalloc.start()
    try:
        RotaryTable(ROPE, ROTARY_DIM, CPU, num_positions)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    table_bytes = 2 * num_positions * (ROTARY_DIM // 2) * 4
    assert peak_bytes < 1.25 * table_bytes


def test_a_checkpoint_of_millions_of_positions_costs_only_those_that_are_served(tmp_path: Path) -> None:
    path = tmp_path / "model"
    synthesize("qwen3_moe", "tiny", 0, {"max_position_embeddings": 3_000_000}, path)
    tracemalloc.start()
    try:
        load_model(path, parse_config(path), torch.float32, CPU, progress=False, max_positions=64)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 * 2**20
