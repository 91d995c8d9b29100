"""How often a prompt may be offered to workers that do not take it, and how long it waits in between."""

import asyncio
from dataclasses import replace
from random import Random

from common.errors import UnavailableError
from router.plan import Plan
from router.worker import Worker

#: Before the second attempt, at most; doubled before each further one. Long enough for a worker that restarts to be
#: heard of, short enough that nobody notices the first.
FIRST_PAUSE_S = 0.05

_random = Random()


class Attempts:
    """Of one prompt. Only what no worker has begun is offered again, so that nothing ever runs twice."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made = 0
        #: Workers that did not take it.
        self.tried: set[Worker] = set()
        #: What the last of them said.
        self.error: UnavailableError | None = None

    def renamed(self, plan: Plan) -> Plan:
        """With an id of its own for every attempt: the pair may have one worker in common with the last one, which
        has perhaps not let go of that yet."""
        return replace(plan, request_id=f"{plan.request_id}-{self._made}") if self._made else plan

    async def failed(self, worker: Worker, error: UnavailableError, *, free: bool = False) -> None:
        """The worker did not take the prompt; returns when another may be asked. Raises `error` if that was the last.

        `free`: the attempt does not count.
        """
        self.tried.add(worker)
        self.error = error
        if free:
            return
        self._made += 1
        if self._made >= self._most:
            raise error
        await asyncio.sleep(FIRST_PAUSE_S * 2 ** (self._made - 1) * _random.uniform(0.5, 1.0))
