"""Weights in float8_e4m3fn inside checkpoint files, each with its scales beside it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from common.errors import CheckpointError
from common.model.checkpoint import CheckpointFiles
from common.model.quantized.block_fp8 import FP8_MAX, Block, dequantize_block_fp8, scale_shape

_SUFFIX = "_scale_inv"
#: What vLLM and llm-compressor write instead, mostly with scales of activations beside it.
_OTHER_SUFFIX = "_scale"
_FP8 = "F8_E4M3"
#: As DeepSeek, Qwen and (for scales that are powers of two) transformers store them.
_SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class StoredFp8:
    """One weight; `block` None is one scale for all of it."""

    files: CheckpointFiles
    name: str
    block: Block | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.files.shape(self.name)

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def parts(self) -> tuple[str, ...]:
        return self.name, self.name + _SUFFIX

    def read(self) -> torch.Tensor:
        weight = self.files.read(self.name)
        scale_inv = self.files.read(self.name + _SUFFIX).float()
        wrong = scale_inv[~(scale_inv * FP8_MAX).isfinite()]
        if wrong.numel():
            raise CheckpointError(
                f"{self.files.path}: {self.name}{_SUFFIX} holds {wrong[0].item()}, with which weights are not finite"
            )
        if self.block is None:
            return weight.float() * scale_inv.reshape(())
        return dequantize_block_fp8(weight, scale_inv, self.block)

    def check(self) -> None:
        """Raises CheckpointError unless the scales fit the weight."""
        scale = self.name + _SUFFIX
        if scale not in self.files:
            self._refuse_other_layout()
            self._fail(f"is stored as {_FP8}, but {scale} is missing; is the download complete?")
        if len(self.shape) != 2:
            self._fail(f"is stored as {_FP8} in shape {list(self.shape)}, but must have two dimensions")
        if self.files.dtype(scale) not in _SCALE_DTYPES:
            self._fail(f"has scales of type {self.files.dtype(scale)}, but supported are {', '.join(_SCALE_DTYPES)}")
        found = self.files.shape(scale)
        # A single scale is written as a scalar or as one block of the whole weight.
        wanted = [(), (1,), (1, 1)] if self.block is None else [scale_shape(self.shape, self.block)]
        if found not in wanted:
            blocks = "one scale" if self.block is None else f"blocks of {list(self.block)}"
            self._fail(
                f"has shape {list(self.shape)}, {blocks} and needs {scale} in shape {list(wanted[-1])}, "
                f"but that has {list(found)}"
            )

    def _refuse_other_layout(self) -> None:
        other = self.name + _OTHER_SUFFIX
        if other in self.files:
            self._fail(
                f"has its scales in {other}, as vLLM and llm-compressor write them, which is not supported; supported "
                f"are scales in {self.name}{_SUFFIX}, as DeepSeek and Qwen publish them, or weights in bfloat16"
            )

    def _fail(self, problem: str) -> None:
        raise CheckpointError(f"{self.files.path}: {self.name} {problem}")


def find_fp8(files: CheckpointFiles, block: Block | None) -> Mapping[str, StoredFp8]:
    """The FP8 weights by name. Raises CheckpointError if one lacks its scale or a scale its weight."""
    weights = {name: StoredFp8(files, name, block) for name in files.names() if files.dtype(name) == _FP8}
    for weight in weights.values():
        weight.check()
    for scale in files.names():
        if scale.endswith(_SUFFIX) and scale.removesuffix(_SUFFIX) not in weights:
            raise CheckpointError(f"{files.path}: {scale} is there, but no {scale.removesuffix(_SUFFIX)} in {_FP8}")
    return weights
