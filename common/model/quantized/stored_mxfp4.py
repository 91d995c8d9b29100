"""Experts in MXFP4 inside checkpoint files: `X_blocks` and `X_scales` are what `X` is unquantised.

Shape suffixes: E experts, O output, I input, G groups of 32 inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.errors import CheckpointError
from common.model.checkpoint import CheckpointFiles
from common.model.quantized.mxfp4 import BYTES_PER_GROUP, GROUP_SIZE, MAX_SCALE, dequantize_mxfp4

_BLOCKS = "_blocks"
_SCALES = "_scales"
_BYTES = "U8"


@dataclass(frozen=True, slots=True)
class StoredMxfp4:
    """One projection of all experts."""

    files: CheckpointFiles
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_outputs, num_groups, _ = self.files.shape(self.name + _BLOCKS)
        return num_experts, num_groups * GROUP_SIZE, num_outputs

    @property
    def dtype(self) -> str:
        return "BF16"

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name + _BLOCKS, self.name + _SCALES

    def read(self) -> torch.Tensor:
        num_experts, num_inputs, num_outputs = self.shape
        out_EOI = torch.empty(num_experts, num_outputs, num_inputs, dtype=torch.bfloat16)
        for expert, out_OI in enumerate(out_EOI):
            out_OI.copy_(self.read_slice(expert).mT)
        return out_EOI.mT

    def read_slice(self, index: int) -> torch.Tensor:
        scales_OG = self.files.read_slice(self.name + _SCALES, index)
        highest = int(scales_OG.max())
        if highest > MAX_SCALE:
            raise CheckpointError(
                f"{self.files.path}: {self.name}{_SCALES} holds {highest} for expert {index}, "
                f"with which weights are not finite; the largest scale is {MAX_SCALE}"
            )
        return dequantize_mxfp4(self.files.read_slice(self.name + _BLOCKS, index), scales_OG)

    def check(self) -> None:
        """Raises CheckpointError unless blocks and scales are there and fit each other."""
        blocks, scales = self.parts
        for part, other in ((blocks, scales), (scales, blocks)):
            if part not in self.files:
                raise CheckpointError(f"{self.files.path}: {other} is there, but {part} is missing")
            if self.files.dtype(part) != _BYTES:
                raise CheckpointError(
                    f"{self.files.path}: {part} is stored as {self.files.dtype(part)}, but must be {_BYTES}"
                )
        if self.name in self.files:
            raise CheckpointError(f"{self.files.path}: {self.name} is there both plain and as {blocks}")
        self._check_shapes(blocks, scales)

    def _check_shapes(self, blocks: str, scales: str) -> None:
        shape = self.files.shape(blocks)
        if len(shape) != 4 or shape[-1] != BYTES_PER_GROUP:
            raise CheckpointError(
                f"{self.files.path}: {blocks} has shape {list(shape)}, "
                f"but must be [experts, outputs, groups, {BYTES_PER_GROUP}]"
            )
        if self.files.shape(scales) != shape[:-1]:
            raise CheckpointError(
                f"{self.files.path}: {scales} has shape {list(self.files.shape(scales))}, "
                f"but {blocks} needs {list(shape[:-1])}"
            )


def find_mxfp4(files: CheckpointFiles) -> Mapping[str, StoredMxfp4]:
    """The MXFP4 tensors by their plain name. Raises CheckpointError if blocks and scales do not fit."""
    bases = [
        name.removesuffix(suffix) for suffix in (_BLOCKS, _SCALES) for name in files.names() if name.endswith(suffix)
    ]
    stored = {base: StoredMxfp4(files, base) for base in bases}
    for tensor in stored.values():
        tensor.check()
    return stored
