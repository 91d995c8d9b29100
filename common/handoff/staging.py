"""Memory that payloads are put together in, used again and again: fresh pages cost more than the copies into them."""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

#: Free memory that is kept: a window of one transfer (`sender.WINDOW_BYTES`), since transfers take turns.
MAX_KEPT_BYTES = 8 * 2**20

Bytes = npt.NDArray[np.uint8]


class Staging:
    """Lends buffers of one size. A buffer is free again when nobody holds the view that was lent, or a view of it.

    So it does not matter who holds it longest: the task that filled it, or the transport that sends from it. More
    buffers are made when none is free, so that a transport that is stuck never holds up another transfer.

    Args:
        buffer_bytes: size of a buffer.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.num_made = 0
        # Buffers come back on whatever thread drops them last; append and pop of a bounded deque need no lock.
        self._free: deque[Bytes] = deque(maxlen=max(1, MAX_KEPT_BYTES // buffer_bytes))

    def lend(self, num_bytes: int) -> Bytes:
        """Writable memory of at most `buffer_bytes`, whose content is undefined."""
        assert num_bytes <= self.buffer_bytes, "more than a buffer holds"
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(self.buffer_bytes, np.uint8)
            self.num_made += 1
        lent = buffer[:num_bytes]
        # Views of a view refer to the array that owns the memory: only a buffer object in between ties them to `lent`.
        view = np.frombuffer(lent.data, np.uint8)
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return view
