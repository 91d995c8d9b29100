"""Log probabilities of prompt tokens, packed: how they travel from where the prompt is computed to the router."""

from typing import NewType

import numpy as np
import numpy.typing as npt

#: One entry: a vocabulary id, its fp32 log-softmax, its rank (1 is the most likely). Little-endian, 12 bytes.
ENTRY = np.dtype([("token_id", "<u4"), ("logprob", "<f4"), ("rank", "<u4")])

#: [positions, 1 + k] of ENTRY: the prompt's own token first, then the k most likely, best first. Position 0 has no
#: probability; its entries are zeros.
PromptLogprobs = NewType("PromptLogprobs", npt.NDArray[np.void])


def position_bytes(num_top: int) -> int:
    """What one position takes."""
    return (1 + num_top) * ENTRY.itemsize


def empty(num_positions: int, num_top: int) -> PromptLogprobs:
    """All zeros, [num_positions, 1 + num_top]."""
    return PromptLogprobs(np.zeros((num_positions, 1 + num_top), ENTRY))


def from_bytes(data: bytes | memoryview, num_top: int) -> PromptLogprobs:
    """A view of packed entries.

    Raises:
        ValueError: the size is no multiple of one position's.
    """
    return PromptLogprobs(np.frombuffer(data, ENTRY).reshape(-1, 1 + num_top))
