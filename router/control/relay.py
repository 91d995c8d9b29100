"""One call to many workers at the same time, and one error for all that failed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from common.errors import MoerelayError
from router.calls import worker_errors
from router.worker import Side, Worker

ReplyT = TypeVar("ReplyT")

#: What is told of each worker that failed, after the first few.
MAX_FAILURES_TOLD = 4


@dataclass(frozen=True, slots=True)
class Replies(Generic[ReplyT]):
    """What every worker answered."""

    replies: Sequence[tuple[Worker, ReplyT]]
    failures: Sequence[tuple[Worker, MoerelayError]]

    def failure(self, consequence: str = "") -> MoerelayError | None:
        """An error of the first failure's class that names all workers that failed; None if none did."""
        if not self.failures:
            return None
        _, first = self.failures[0]
        told = [_sentence(worker, error) for worker, error in self.failures[:MAX_FAILURES_TOLD]]
        if len(self.failures) > MAX_FAILURES_TOLD:
            told.append(f"{len(self.failures) - MAX_FAILURES_TOLD} more workers failed")
        return type(first)("; ".join([*told, *filter(None, [consequence])]), param=first.param)

    def check(self, consequence: str = "") -> None:
        """Raises `failure`, if there is one."""
        if error := self.failure(consequence):
            raise error


def _sentence(worker: Worker, error: MoerelayError) -> str:
    name = f"worker {worker.id}"
    return error.message if error.message.startswith(name) else f"{name}: {error.message}"


async def ask_in_order(
    workers: Sequence[Worker], sides: Sequence[Side], call: Callable[[Worker], Awaitable[ReplyT]]
) -> Replies[ReplyT]:
    """Calls one side after the other; a failure on the first does not spare the second."""
    parts = [await ask([worker for worker in workers if worker.side == side], call) for side in sides]
    return Replies(
        [reply for part in parts for reply in part.replies], [failure for part in parts for failure in part.failures]
    )


async def ask(workers: Sequence[Worker], call: Callable[[Worker], Awaitable[ReplyT]]) -> Replies[ReplyT]:
    """Calls every worker, all at once, and waits for all."""

    async def one(worker: Worker) -> ReplyT | MoerelayError:
        try:
            with worker_errors(worker.id):
                return await call(worker)
        except MoerelayError as error:
            return error

    outcomes = list(zip(workers, await asyncio.gather(*(one(worker) for worker in workers)), strict=True))
    return Replies(
        [(worker, outcome) for worker, outcome in outcomes if not isinstance(outcome, MoerelayError)],
        [(worker, outcome) for worker, outcome in outcomes if isinstance(outcome, MoerelayError)],
    )
