"""Routing rows on their way through the router: the bytes that came, which become an array only where one is needed."""

from collections.abc import Sequence

import msgspec
import numpy as np

from common.routing.record import RoutingArray, RoutingLayout


class Rows(msgspec.Struct, frozen=True, gc=False):
    """[num_rows, L, K] ids in C order, little-endian, in any number of parts that follow each other."""

    layout: RoutingLayout
    num_rows: int
    parts: Sequence[bytes | memoryview]

    @property
    def num_bytes(self) -> int:
        return len(self.parts[0]) if len(self.parts) == 1 else sum(map(len, self.parts))

    @property
    def data(self) -> bytes | memoryview:
        """All of it; joined anew each time, because all rows of a choice may take a while."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_rows, self.layout.num_layers, self.layout.top_k

    @property
    def array_TLK(self) -> RoutingArray:
        """Views one part and joins several. numpy lets other threads run while it copies what is large."""
        flat = [np.frombuffer(part, self.layout.wire_dtype) for part in self.parts]
        joined = flat[0] if len(flat) == 1 else np.concatenate([np.empty(0, self.layout.wire_dtype), *flat])
        return joined.reshape(self.shape)
