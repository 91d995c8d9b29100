"""The safetensors files of a checkpoint as one set of named tensors, read through mmap."""

from collections.abc import Collection, Mapping
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


class CheckpointFiles:
    """Opens all files of a checkpoint directory: those of its index, else the single file, else every file.

    Raises:
        CheckpointError: there is no such file, or one is broken or repeats a tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._file_of: dict[str, safe_open] = {}
        paths = _find_files(path)
        self.num_bytes = sum(file.stat().st_size for file in paths)
        for file in paths:
            self._open(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())  # type: ignore[no-untyped-call]

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it stands in the file, on the CPU; valid while the files are open."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def check(self, expected: Mapping[str, tuple[int, ...]], *, optional: Collection[str]) -> None:
        """Raises CheckpointError unless the files hold exactly the expected tensors, in the expected shapes."""
        missing = [name for name in expected if name not in self]
        if missing:
            raise CheckpointError(f"{self.path}: {_some(missing)} missing; is the download complete?")
        known = expected.keys() | set(optional)
        unknown = [name for name in self._file_of if name not in known and not name.endswith(_DERIVED)]
        if unknown:
            raise CheckpointError(f"{self.path}: {_some(unknown)} unknown to this architecture; does config.json fit?")
        for name, shape in expected.items():
            if self.shape(name) != shape:
                found = list(self.shape(name))
                raise CheckpointError(f"{self.path}: {name} has shape {found}, but config.json asks for {list(shape)}")

    def _open(self, file: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
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
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path}: {', '.join(missing)} missing; is the download complete?")
    return files


def _some(names: list[str]) -> str:
    """'tensor a is' or 'tensors a, b, c and 9 more are'."""
    if len(names) == 1:
        return f"tensor {names[0]} is"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensors {', '.join(names[:3])}{more} are"
