"""One forward pass as the engine describes it to the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.kv.pool import BlockId


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence: positions [start, start + len(token_ids)).

    `blocks` are all blocks of the sequence, in order; KV of positions [0, start) is in them already.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[BlockId]
    #: The last token's logits are wanted.
    wants_logits: bool
    #: Routing rows of these positions are to be stored.
    wants_rows: bool

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class Runner(Protocol):
    """Computes one batch; writes KV and routing rows of every position into the store."""

    def execute(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """fp32 logits [number of chunks with wants_logits, vocab_size], in the order of those chunks."""
        ...
