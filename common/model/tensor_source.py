"""The tensors of an open checkpoint on their way into a decoder: converted, placed, and digested."""

import dataclasses
import json
from collections.abc import Iterator

import torch
import xxhash

from common.model.checkpoint import CheckpointTensors
from common.model.config import ModelConfig
from common.progress import Advance


class TensorSource:
    """Copies tensors into place, converted, and keeps a digest of each as it was before that.

    Of a quantised tensor that is the digest of the values that it stands for, in the type that they are dequantised to:
    a checkpoint and its dequantised copy have equal digests.
    """

    def __init__(self, files: CheckpointTensors, dtype: torch.dtype, device: torch.device, advance: Advance) -> None:
        self._files = files
        self.dtype = dtype
        self._device = device
        self._advance = advance
        self._digests: dict[str, str] = {}

    def empty(self, *shape: int) -> torch.Tensor:
        """Uninitialised, in the compute dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised if need be and not converted, on the CPU; valid while the files are open."""
        tensor = self._files.read(name)
        self._digest(name, tensor.dtype, xxhash.xxh3_128(self._take(tensor)))
        return tensor

    def slices(self, name: str) -> Iterator[torch.Tensor]:
        """What `read` returns, along the first dimension and one at a time, so that the rest is not in memory.

        All of them must be taken, because the digest is over all of them.
        """
        digest = xxhash.xxh3_128()
        for index in range(self._files.shape(name)[0]):
            tensor = self._files.read_slice(name, index)
            digest.update(self._take(tensor))
            yield tensor
        self._digest(name, tensor.dtype, digest)

    def _take(self, tensor: torch.Tensor) -> memoryview:
        """The bytes, counted as read."""
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        self._advance(raw.nbytes)
        return raw

    def _digest(self, name: str, dtype: torch.dtype, digest: xxhash.xxh3_128) -> None:
        self._digests[name] = f"{list(self._files.shape(name))} {dtype} {digest.hexdigest()}"

    def fill(self, out: torch.Tensor, name: str) -> None:
        """Copies one tensor into `out`, which has its shape."""
        out.copy_(self.read(name))

    def tensor(self, name: str) -> torch.Tensor:
        """In the compute dtype."""
        out = self.empty(*self._files.shape(name))
        self.fill(out, name)
        return out

    def fp32(self, name: str) -> torch.Tensor:
        """In fp32, not rounded to the compute dtype on the way."""
        return self.read(name).to(self._device, torch.float32, copy=True)

    def joined(self, *names: str) -> torch.Tensor:
        """Tensors one below the other, along the first dimension."""
        sizes = [self._files.shape(name)[0] for name in names]
        out = self.empty(sum(sizes), *self._files.shape(names[0])[1:])
        for part, name in zip(torch.split(out, sizes), names, strict=True):
            self.fill(part, name)
        return out

    def fingerprint(self, config: ModelConfig, rotary_digest: str) -> str:
        """Digest of everything that decides what the decoder computes."""
        lines = [json.dumps(dataclasses.asdict(config), sort_keys=True, default=sorted), rotary_digest]
        lines += [f"{name} {self._digests[name]}" for name in sorted(self._digests)]
        return xxhash.xxh3_128_hexdigest("\n".join(lines).encode())
