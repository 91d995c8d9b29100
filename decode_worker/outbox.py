"""What one request has produced and its reader has not taken yet: what belongs together coalesces together."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.engine.request import BlocksLeased, EngineEvent, Failed, PrefillsLocally, Progress
from common.errors import MoerelayError
from common.prompt_logprobs import PromptLogprobs
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken


@dataclass(slots=True)
class Batch:
    """Everything that became available for one choice since the last `take`."""

    choice: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    rows: list[RoutingArray] = field(default_factory=list)
    logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    #: With the choice's first token: prompt tokens that were not computed for this request.
    num_cached: int = 0

    @property
    def rows_TLK(self) -> RoutingArray | None:
        """The rows as one [T, L, K] array, None when there is none."""
        return np.concatenate(self.rows) if self.rows else None

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of consecutive positions as one array, None when there are none."""
        return PromptLogprobs(np.concatenate(self.logprobs)) if self.logprobs else None


class Outbox:
    """A coalescing mailbox for one reader. Bounded: a choice never produces more than its context holds."""

    def __init__(self, num_choices: int = 1) -> None:
        self._admitted: asyncio.Future[BlocksLeased | PrefillsLocally] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        #: Every choice has finished, or the request has failed.
        self._over = asyncio.Event()
        self._num_choices = num_choices
        self._finished: set[int] = set()
        self._batches: dict[int, Batch] = {}
        #: Is told of everything that the reader takes.
        self.on_taken: Callable[[Sequence[Batch]], None] | None = None
        #: Why the request failed.
        self.error: MoerelayError | None = None
        #: Called whenever there is something to take, and when the request has failed.
        self.on_ready: Callable[[], None] | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def put(self, event: EngineEvent) -> None:
        """Takes one engine event of this request."""
        match event:
            case BlocksLeased() | PrefillsLocally():
                self._admitted.set_result(event)
            case Progress():
                self._put_progress(event)
            case Failed(error=error):
                self.fail(error)
            case _:
                raise AssertionError(f"a decode worker's engine does not emit {type(event).__name__}")

    def _put_progress(self, event: Progress) -> None:
        batch = self._batch(event.choice)
        batch.tokens.extend(event.tokens)
        if event.rows_TLK is not None and len(event.rows_TLK):
            batch.rows.append(event.rows_TLK)
        if event.prompt_logprobs is not None:
            batch.logprobs.append(event.prompt_logprobs)
        batch.finish = event.finish
        batch.num_cached += event.num_cached
        if event.finish is not None:
            self._finished.add(event.choice)
        if len(self._finished) == self._num_choices:
            self._over.set()
        self._tell()

    def put_prompt_logprobs(self, entries: PromptLogprobs) -> None:
        """Takes those that came with a handoff; they travel with the first choice that has not ended."""
        choice = next((c for c in range(self._num_choices) if c not in self._finished), None)
        if choice is not None:
            self._batch(choice).logprobs.append(entries)
            self._tell()

    def _batch(self, choice: int) -> Batch:
        return self._batches.setdefault(choice, Batch(choice))

    def fail(self, error: MoerelayError) -> None:
        """Ends the request with `error`, whether or not its blocks were leased yet."""
        self.error = self.error or error
        self._over.set()
        self._tell()

    def _tell(self) -> None:
        self._ready.set()
        if self.on_ready is not None:
            self.on_ready()

    async def admitted(self) -> BlocksLeased | PrefillsLocally | None:
        """Work.DECODE: waits until there are enough free blocks; None if the request ended before.

        Raises:
            MoerelayError: the request failed while it waited.
        """
        ended = asyncio.create_task(self._over.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [self._admitted, ended]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self.error is not None:
            raise self.error
        return self._admitted.result() if self._admitted.done() else None

    async def take(self) -> list[Batch]:
        """Waits until there is something, and returns all of it, one batch for each choice that has some.

        Raises:
            MoerelayError: the request failed; what it produced before is void.
        """
        await self._ready.wait()
        if self.error is not None:
            raise self.error
        return self.take_now()

    def take_now(self) -> list[Batch]:
        """As `take`, of a request that has not failed: what there is, which may be nothing."""
        self._ready.clear()
        batches, self._batches = self._batches, {}
        taken = [batches[choice] for choice in sorted(batches)]
        if self.on_taken is not None:
            self.on_taken(taken)
        return taken
