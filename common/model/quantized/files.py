"""A quantised checkpoint, seen as if it were not: plain names and shapes, values dequantised as they are read."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch

from common.errors import CheckpointError
from common.model.checkpoint import CheckpointFiles, CheckpointTensors
from common.model.quantized.config import Quantization
from common.model.quantized.stored_fp8 import find_fp8
from common.model.quantized.stored_mxfp4 import StoredMxfp4, find_mxfp4


class StoredTensor(Protocol):
    """One quantised tensor, wherever its values and scales are stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The names that it is stored under, which are not tensors of their own."""

    def read(self) -> torch.Tensor: ...


class DequantizedFiles(CheckpointTensors):
    """Wraps the files of a quantised checkpoint and hides scales and blocks.

    FP8 weights read as float32, MXFP4 ones as bfloat16, which holds them exactly. A read allocates what it returns
    and little more.

    Raises:
        CheckpointError: scales are missing, left over, of the wrong shape or type, or (when read) not finite.
    """

    def __init__(self, files: CheckpointFiles, quantization: Quantization) -> None:
        self.path = files.path
        self._files = files
        self._stored = _find_stored(files, quantization)
        hidden = {part for stored in self._stored.values() for part in stored.parts}
        self._names = dict.fromkeys([*(name for name in files.names() if name not in hidden), *self._stored])

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored.get(name)
        return stored.shape if stored else self._files.shape(name)

    def dtype(self, name: str) -> str:
        stored = self._stored.get(name)
        return stored.dtype if stored else self._files.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """The dequantised tensor, or as it stands in the file if it is not quantised."""
        stored = self._stored.get(name)
        return stored.read() if stored else self._files.read(name)

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        stored = self._stored.get(name)
        if stored is None:
            return self._files.read_slice(name, index)
        assert isinstance(stored, StoredMxfp4), f"{name} is one matrix, which is read as a whole"
        return stored.read_slice(index)

    def close(self) -> None:
        self._files.close()


def open_checkpoint(path: Path, quantization: Quantization | None) -> CheckpointTensors:
    """The tensors in `path`, dequantised if need be.

    Raises:
        CheckpointError: as `CheckpointFiles` and `DequantizedFiles`.
    """
    files = CheckpointFiles(path)
    if quantization is None:
        return files
    try:
        return DequantizedFiles(files, quantization)
    except CheckpointError:
        files.close()
        raise


def _find_stored(files: CheckpointFiles, quantization: Quantization) -> Mapping[str, StoredTensor]:
    if quantization.kind == "mxfp4":
        return find_mxfp4(files)
    return find_fp8(files, quantization.block)
