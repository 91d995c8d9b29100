"""What an extension module offers, for the type checker: see csrc/module.cpp. Every argument that names a tensor is its
address; 0 stands for none."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: Contiguous memory.
Memory = memoryview | npt.NDArray[np.generic]


class Linear(Protocol):
    def __call__(self, x: int, stride: int, num_rows: int, y: int) -> None:
        """y [rows, outputs] = x · weightᵀ + bias; rows of x begin `stride` elements apart."""


class Router(Protocol):
    def __call__(
        self, x: int, num_tokens: int, ids: int, weights: int, rows: int, row_bytes: int, id_bytes: int
    ) -> None:
        """ids int32 and weights fp32, both [tokens, top_k]; ids of `id_bytes` each also go to `rows`."""


class Experts(Protocol):
    def __call__(self, x: int, ids: int, weights: int, num_tokens: int, top_k: int, y: int) -> None: ...


class Heads(Protocol):
    def __call__(
        self,
        fused: int,
        cos: int,
        sin: int,
        positions: int,
        slots: int,
        num_tokens: int,
        q: int,
        keys: int,
        values: int,
    ) -> None: ...


class Layers(Protocol):
    def add(
        self,
        input_norm: int,
        feed_forward_norm: int,
        qkv: Linear,
        heads: Heads,
        out: Linear,
        window: int,
        sinks: int,
        router: Router,
        experts: Experts,
        /,
    ) -> None: ...

    def __call__(
        self,
        num_tokens: int,
        positions: int,
        slots: int,
        cos: int,
        sin: int,
        block_size: int,
        block_table: int,
        sequences: int,
        num_sequences: int,
        kv: int,
        plane_elements: int,
        rows: int,
        row_bytes: int,
        id_bytes: int,
        layer_row_bytes: int,
        x: int,
        /,
    ) -> None: ...


class Typed(Protocol):
    """The functions and classes of one element type."""

    Linear: Callable[..., Linear]
    Router: Callable[..., Router]
    Experts: Callable[..., Experts]
    Heads: Callable[..., Heads]
    Layers: Callable[[float], Layers]

    def pack(self, weight: int, num_outputs: int, num_inputs: int, fused: bool, to: int) -> None: ...

    def add_norm(self, x: int, delta: int, weight: int, eps: float, num_rows: int, size: int, to: int) -> None: ...

    def attend(
        self,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        block_size: int,
        window: int,
        sinks: int,
        q: int,
        keys: int,
        values: int,
        block_table: int,
        sequences: int,
        num_sequences: int,
        out: int,
    ) -> None: ...


class TypedBfloat16(Typed, Protocol):
    Fp32Router: Callable[..., Router]


class NativeModule(Protocol):
    #: Digest of the source that the module was built from.
    source: str
    float32: Typed
    bfloat16: TypedBfloat16

    def gather(
        self, base: int, plane_bytes: int, num_planes: int, slot_bytes: int, slots: Memory, to: Memory, /
    ) -> None:
        """Copies slots (int64) of every plane, in order. Raises ValueError if the memory is of another size."""

    def scatter(
        self, base: int, plane_bytes: int, num_planes: int, slot_bytes: int, slots: Memory, source: Memory, /
    ) -> None:
        """Copies contiguous memory to the slots: the opposite of `gather`."""
