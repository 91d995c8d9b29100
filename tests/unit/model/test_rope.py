"""The rotary table: as long as it must be, and the same numbers however long it is."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.model.config import ModelConfig
from common.model.families import parse_config
from common.model.loader import load_model
from common.model.presets import synthetic_config
from common.model.rope import RotaryTable
from common.model.synthesize import synthesize

CPU = torch.device("cpu")
#: Tables are computed in slabs of 8192 positions; lengths around the edges, and a far position.
LENGTHS = (1, 2, 17, 8191, 8192, 8193, 20_000)


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(synthetic_config("qwen3_moe", "tiny", {"rope_theta": 1e6})))
    return parse_config(tmp_path)


def table(config: ModelConfig, num_positions: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    cos, sin = RotaryTable(config, CPU, num_positions).look_up(torch.arange(num_positions))
    return cos.squeeze(1).numpy(), sin.squeeze(1).numpy()


@pytest.mark.parametrize("num_positions", LENGTHS)
def test_values_are_those_of_the_whole_formula_bit_for_bit(config: ModelConfig, num_positions: int) -> None:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = (1.0 / (1e6**exponents)).numpy()
    angles = np.arange(max(LENGTHS), dtype=np.float32)[:, None] * frequencies
    cos, sin = table(config, num_positions)
    assert cos.tobytes() == np.cos(angles.astype(np.float64)).astype(np.float32)[:num_positions].tobytes()
    assert sin.tobytes() == np.sin(angles.astype(np.float64)).astype(np.float32)[:num_positions].tobytes()


def test_a_long_table_needs_little_more_than_itself(config: ModelConfig) -> None:
    num_positions = 300_000
    tracemalloc.start()
    try:
        RotaryTable(config, CPU, num_positions)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    table_bytes = 2 * num_positions * (config.head_dim // 2) * 4
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
