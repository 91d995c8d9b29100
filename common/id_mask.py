"""Sets of vocabulary ids, packed: a mask may hold the whole vocabulary, for every token of an answer."""

from collections.abc import Iterable

import numpy as np

#: One id, little-endian.
ID = np.dtype("<u4")


def pack_ids(ids: Iterable[int]) -> bytes:
    """4 bytes per id, in the order given."""
    return np.fromiter(ids, ID).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`. Raises ValueError if the size is no multiple of 4."""
    ids: list[int] = np.frombuffer(packed, ID).tolist()
    return ids
