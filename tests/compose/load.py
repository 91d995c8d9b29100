"""Requests that go on while something happens to the stack, and what their answers must be."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import numpy as np

from common.engine.solo import SoloResult, SoloRunner
from common.sampling import SamplingParams
from tests.e2e.cluster import Answer, Client

NUM_CLIENTS = 8
NUM_PROMPTS = 24
#: Long enough to be met by what happens, short enough for a solo run of each.
NUM_TOKENS = 100


def prompt(index: int) -> list[int]:
    """Prompts that begin with different tokens, so that no cache makes two of them prefer one worker."""
    return [3 + index, *range(40, 60)]


class Expected:
    """Solo runs of the prompts, each computed once."""

    def __init__(self, solo: SoloRunner) -> None:
        self._solo = solo
        self._runs: dict[tuple[int, int], SoloResult] = {}

    def check(self, index: int, answer: Answer, num_tokens: int = NUM_TOKENS) -> None:
        assert answer.status == 200, answer.error
        assert answer.error is None, answer.error
        key = index, num_tokens
        if key not in self._runs:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            self._runs[key] = self._solo.run(prompt(index), params)
        run = self._runs[key]
        assert answer.token_ids == [token.token_id for token in run.tokens]
        assert answer.finish_reason == "length"
        assert run.rows_TLK is not None
        assert answer.rows.dtype == run.rows_TLK.dtype
        assert np.array_equal(answer.rows, run.rows_TLK)


class Load:
    """What came of the requests so far, each with the number of its prompt."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._numbers = count()
        self._stopped = False

    async def run(self, client: Client) -> None:
        """One client: a request after the other, every other one a stream."""
        while not self._stopped:
            number = next(self._numbers)
            index = number % NUM_PROMPTS
            answer = await client.generate(
                prompt(index), max_tokens=NUM_TOKENS, ignore_eos=True, stream=number % 2 == 0
            )
            self.answers.append((index, answer))

    def stop(self) -> None:
        self._stopped = True


@asynccontextmanager
async def under_load(client: Client) -> AsyncIterator[Load]:
    """Clients that ask until the block is left; all have their last answer then."""
    load = Load()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(load.run(client))
        try:
            yield load
        finally:
            load.stop()
