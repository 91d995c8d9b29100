"""Loads further checkpoints of the model that a worker serves, on a thread of its own, while it serves."""

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from common.errors import CheckpointError, InvalidRequestError, UnavailableError
from common.model.config import ModelConfig
from common.model.families import parse_config
from common.model.kernels.interface import Kernels
from common.model.loader import LoadedModel, load_model

#: What may differ: weights are converted and dequantised, layers that predict further tokens are left alone, and the
#: ends of sequences stay those that the worker started with.
_FREE_FIELDS = frozenset({"dtype", "eos_token_ids", "num_extra_layers", "quantization"})


class CheckpointLoader:
    """Loads what fits `config`: the same architecture and shape, so that KV, rows and requests keep their meaning."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_positions: int, kernels: Kernels
    ) -> None:
        self._config = config
        self._load = partial(
            load_model, dtype=dtype, device=device, progress=False, max_positions=max_positions, kernels=kernels
        )
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="weights",
            # A new thread would compute with every core; see Engine._run.
            initializer=partial(torch.set_num_threads, torch.get_num_threads()),
        )

    async def load(self, path: Path) -> LoadedModel:
        """Loads the checkpoint in the directory `path`; one at a time.

        Raises:
            InvalidRequestError: it is missing, broken, or of another architecture or shape.
            UnavailableError: the memory does not suffice for a second set of weights.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._load_now, path)

    def _load_now(self, path: Path) -> LoadedModel:
        try:
            config = parse_config(path)
            if difference := _difference(self._config, config):
                raise InvalidRequestError(f"{path} is another model: {difference}", param="path")
            return self._load(path, config)
        except CheckpointError as error:
            raise InvalidRequestError(f"the checkpoint cannot be used: {error.message}", param="path") from error
        except (RuntimeError, MemoryError) as error:  # torch's and NumPy's ways to say that memory is out
            raise UnavailableError(f"there is no room for {path} beside the weights in use: {error}") from error


def _difference(served: ModelConfig, other: ModelConfig) -> str | None:
    """The first value in which the configurations differ, in words; None if the weights are interchangeable."""
    mine, theirs = _values(served), _values(other)
    for name in mine | theirs:
        if mine.get(name) != theirs.get(name):
            return f"{name} is {theirs.get(name)!r}, and {mine.get(name)!r} in the model that is served"
    return None


def _values(config: ModelConfig) -> dict[str, object]:
    """By name; what belongs to attention, experts, router or rotary embedding with that in front."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(ModelConfig):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values |= {f"{field.name}.{part.name}": getattr(value, part.name) for part in dataclasses.fields(value)}
        else:
            values[field.name] = value
    return {name: value for name, value in values.items() if name.split(".")[0] not in _FREE_FIELDS}
