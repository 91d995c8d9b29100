"""What one request has produced and its reader has not taken yet: tokens, logprobs and rows coalesce together."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.engine.request import BlocksLeased, EngineEvent, Failed, Progress
from common.errors import MoerelayError
from common.kv.pool import BlockId
from common.routing.record import RoutingArray
from common.sampling import Finish, SampledToken


@dataclass(slots=True)
class Batch:
    """Everything that became available since the last `take`."""

    tokens: list[SampledToken] = field(default_factory=list)
    rows: list[RoutingArray] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def rows_TLK(self) -> RoutingArray | None:
        """The rows as one [T, L, K] array, None when there is none."""
        return np.concatenate(self.rows) if self.rows else None


class Outbox:
    """A coalescing mailbox for one reader. Bounded: a request never produces more than its context holds."""

    def __init__(self) -> None:
        self._leased: asyncio.Future[tuple[BlockId, ...]] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._batch = Batch()
        self._error: MoerelayError | None = None

    def put(self, event: EngineEvent) -> None:
        """Takes one engine event of this request."""
        match event:
            case BlocksLeased(blocks=blocks):
                self._leased.set_result(blocks)
            case Progress(tokens=tokens, rows_TLK=rows_TLK, finish=finish):
                self._batch.tokens.extend(tokens)
                if rows_TLK is not None and len(rows_TLK):
                    self._batch.rows.append(rows_TLK)
                self._batch.finish = finish
                self._ready.set()
            case Failed(error=error):
                self.fail(error)
            case _:
                raise AssertionError(f"a decode worker's engine does not emit {type(event).__name__}")

    def fail(self, error: MoerelayError) -> None:
        """Ends the request with `error`, whether or not its blocks were leased yet."""
        self._error = self._error or error
        self._ready.set()

    async def leased(self) -> tuple[BlockId, ...] | None:
        """The reserved blocks, once there are enough free ones; None if the request ended before.

        Raises:
            MoerelayError: the request failed while it waited.
        """
        ended = asyncio.create_task(self._ready.wait())
        try:
            waiting: list[asyncio.Future[Any]] = [self._leased, ended]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._error is not None:
            raise self._error
        return self._leased.result() if self._leased.done() else None

    async def take(self) -> Batch:
        """Waits until there is something, and returns all of it.

        Raises:
            MoerelayError: the request failed; what it produced before is void.
        """
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        self._ready.clear()
        batch, self._batch = self._batch, Batch()
        return batch
