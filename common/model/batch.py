"""One forward pass as the engine describes it to the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.kv.pool import BlockId
from common.prompt_logprobs import PromptLogprobs


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
    #: Ids whose log probabilities are wanted, given the logits at positions start, start + 1, …: the prompt's own
    #: tokens at start + 1, start + 2, …; at most as many as the chunk has tokens, one fewer when it ends the prompt.
    score_targets: Sequence[int] = ()
    #: The most likely ids told beside each of them.
    num_top: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one batch gives."""

    #: fp32 [number of chunks with wants_logits, vocab_size], in the order of those chunks.
    logits_NV: torch.Tensor
    #: [len(score_targets), 1 + num_top] per chunk with score_targets, in the order of those chunks.
    scores: tuple[PromptLogprobs, ...] = ()


class Runner(Protocol):
    """Computes one batch after the other; writes KV and routing rows of every position into the store."""

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Tells, before a batch is executed, which one will probably follow it, with any ids; none if nobody knows.

        Whatever does not depend on ids may be worked out meanwhile. What really follows may be something else.
        """

    def execute(self, chunks: Sequence[Chunk]) -> StepOutput: ...
