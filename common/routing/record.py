"""The routing record: dtype and shape of expert ids. Shape suffixes: T positions, L layers, K experts per token."""

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

#: Expert ids in the model's routing dtype: uint8, uint16 or int32.
RoutingArray = npt.NDArray[np.integer]


@cache
def routing_dtype(num_experts: int) -> np.dtype[np.unsignedinteger] | np.dtype[np.int32]:
    """uint8 up to 256 experts, uint16 up to 65,536, int32 beyond: by the model, never by the values."""
    if num_experts <= 256:
        return np.dtype(np.uint8)
    if num_experts <= 65_536:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class RoutingLayout:
    """Shape and dtype of a model's routing rows; equal on every worker of a cluster."""

    num_layers: int
    top_k: int
    num_experts: int
    #: As rows travel between processes: little-endian.
    wire_dtype: np.dtype[np.integer] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Not asked anew for every event of a stream.
        object.__setattr__(self, "wire_dtype", self.dtype.newbyteorder("<"))

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger] | np.dtype[np.int32]:
        return routing_dtype(self.num_experts)

    @property
    def row_bytes(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize

    def empty(self, num_rows: int) -> RoutingArray:
        """C-order [num_rows, L, K] array with undefined content."""
        return np.empty((num_rows, self.num_layers, self.top_k), self.dtype)

    def from_bytes(self, data: bytes | memoryview, num_rows: int) -> RoutingArray:
        """Views little-endian bytes as [num_rows, L, K]. Raises ValueError if the size does not fit."""
        if len(data) != num_rows * self.row_bytes:
            raise ValueError(
                f"{len(data)} bytes of routing rows where {num_rows} rows need {num_rows * self.row_bytes}"
            )
        return np.frombuffer(data, self.wire_dtype).reshape(num_rows, self.num_layers, self.top_k)
