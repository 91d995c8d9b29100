"""The safetensors files of a checkpoint as one set of named tensors, read through mmap."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open

from common.errors import CheckpointError
from common.model.config import read_json

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

#: Buffers that old versions of transformers saved although they follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq",)


#: Types that hold plain values, in the spelling of safetensors, and the bytes of a value.
_PLAIN_DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}


class CheckpointTensors(ABC):
    """The named tensors of a checkpoint; a context manager, because files are open behind it.

    A name that is not there is the caller's bug (KeyError); `check` is where wrong checkpoints are found.
    """

    path: Path

    @abstractmethod
    def names(self) -> Collection[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> str:
        """Type of the values that `read` returns, in the spelling of safetensors: F32, BF16, F8_E4M3, ..."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU and not to be written to; valid while the files are open. May not be contiguous."""

    @abstractmethod
    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Equals `read(name)[index]` without reading the rest, of a plain tensor or one of all experts."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def num_bytes(self, names: Iterable[str]) -> int:
        """What reading each of these tensors once amounts to; they are of plain types, as `check` has found."""
        return sum(math.prod(self.shape(name)) * _PLAIN_DTYPES[self.dtype(name)] for name in names)

    def check(self, expected: Mapping[str, tuple[int, ...]], *, optional: Collection[str]) -> None:
        """Raises CheckpointError unless there are exactly the expected tensors, in the expected shapes."""
        missing = [name for name in expected if name not in self]
        if missing:
            raise CheckpointError(f"{self.path}: {_some(missing)} missing; is the download complete?")
        known = expected.keys() | set(optional)
        unknown = [name for name in self.names() if name not in known and not name.endswith(_DERIVED)]
        if unknown:
            raise CheckpointError(f"{self.path}: {_some(unknown)} unknown to this architecture; does config.json fit?")
        for name, shape in expected.items():
            self._check_tensor(name, shape)

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if self.shape(name) != shape:
            found = list(self.shape(name))
            raise CheckpointError(f"{self.path}: {name} has shape {found}, but config.json asks for {list(shape)}")
        if self.dtype(name) not in _PLAIN_DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {self.dtype(name)}, but must be one of {', '.join(_PLAIN_DTYPES)} "
                "unless quantization_config in config.json says how to read it"
            )


class CheckpointFiles(CheckpointTensors):
    """Opens all files of a checkpoint directory: those of its index, else the single file, else every file.

    Raises:
        CheckpointError: there is no such file, or one is broken or repeats a tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._file_of: dict[str, safe_open] = {}
        paths = _find_files(path)
        for file in paths:
            self._open(file)

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def dtype(self, name: str) -> str:
        return str(self._file_of[name].get_slice(name).get_dtype())  # type: ignore[no-untyped-call]

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it stands in the file."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_slice(name)[index]  # type: ignore[no-untyped-call]
        return tensor

    def close(self) -> None:
        self._stack.close()

    def _open(self, file: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise CheckpointError(
                f"{file} cannot be read as safetensors: {error}; is the download complete?"
            ) from error
        for name in opened.keys():  # noqa: SIM118  (not a dict: it is not iterable)
            if name in self._file_of:
                self._stack.close()
                raise CheckpointError(f"{file} repeats tensor {name} of another file")
            self._file_of[name] = opened


def _find_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        files = [path / name for name in sorted(set(weight_map.values()))]
    elif (path / _SINGLE).exists():
        files = [path / _SINGLE]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} holds no *.safetensors file")
    missing = [file.name for file in files if not _is_file(file)]
    if missing:
        raise CheckpointError(f"{path}: {', '.join(missing)} missing; is the download complete?")
    return files


def _is_file(path: Path) -> bool:
    """Raises CheckpointError where that cannot be told: the name is too long, a folder is closed."""
    try:
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _some(names: list[str]) -> str:
    """'tensor a is' or 'tensors a, b, c and 9 more are'."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensors {', '.join(names[:3])}{more} are"
