"""What one request was told, kept until it can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.engine.request import EngineRequest
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, FinishReason, SampledToken
from decode_worker.outbox import Batch


@dataclass(slots=True)
class RecordedChoice:
    """One choice, as it left the outbox."""

    tokens: list[SampledToken] = field(default_factory=list)
    rows: list[RoutingArray] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def rows_TLK(self) -> RoutingArray | None:
        """All rows as one array; None when there are none."""
        return np.concatenate(self.rows) if self.rows else None

    @property
    def is_whole(self) -> bool:
        """It ended by itself."""
        return self.finish is not None and self.finish.reason is not FinishReason.ABORT


class Recording:
    """Everything that a request's outbox has given away; copies nothing."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.choices = tuple(RecordedChoice() for _ in range(request.sampling.n))
        self._logprobs: list[PromptLogprobs] = []

    def add(self, batches: Sequence[Batch]) -> None:
        """Takes what goes to the reader now."""
        for batch in batches:
            choice = self.choices[batch.choice]
            choice.tokens += batch.tokens
            choice.rows += batch.rows
            choice.finish = batch.finish
            # Of the prompt, so of the request: they travel with whichever choice has not ended.
            self._logprobs += batch.logprobs

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of all positions; None when there are none."""
        return PromptLogprobs(np.concatenate(self._logprobs)) if self._logprobs else None

    @property
    def is_over(self) -> bool:
        """Every choice has ended, one way or another."""
        return all(choice.finish is not None for choice in self.choices)
