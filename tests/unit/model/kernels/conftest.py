"""Every set of kernels that runs here, in both dtypes."""

import pytest
import torch

from common.model.families import config_from_json
from common.model.kernels.choice import available_kernels
from common.model.kernels.interface import Kernels
from common.model.presets import synthetic_config

_CONFIG = config_from_json(synthetic_config("mixtral", "tiny", {}), {}, source="config.json")


@pytest.fixture(params=available_kernels(torch.device("cpu"), _CONFIG), ids=lambda kernels: kernels.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    chosen: Kernels = request.param
    return chosen


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def num_threads(request: pytest.FixtureRequest) -> int:
    """Sets torch's number, which is that of OpenMP; the folder's fixture restores it."""
    number: int = request.param
    torch.set_num_threads(number)
    return number
