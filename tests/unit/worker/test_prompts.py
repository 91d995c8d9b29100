"""The prefill worker's mailbox: of KV the latest event says all, of logprobs each has its own."""

import asyncio

import numpy as np
import pytest

from common.engine.request import Failed, PromptAdvanced, RequestId
from common.errors import HandoffError, InternalError
from common.kv.pool import BlockId
from common.prompt_logprobs import PromptLogprobs, empty
from common.sampling import SampledToken
from prefill_worker.service import Prompts

ID = RequestId("r")
BLOCKS = (BlockId(3), BlockId(4))


def advanced(computed: int, first: int | None = None, count: int = 0) -> PromptAdvanced:
    """`count` positions of logprobs from `first` on, which carry their own number."""
    logprobs = None
    if first is not None:
        logprobs = empty(count, 0)
        logprobs["rank"][:, 0] = np.arange(first, first + count)
    return PromptAdvanced(ID, BLOCKS, computed, (), logprobs)


def ranks(logprobs: PromptLogprobs | None) -> list[int]:
    assert logprobs is not None
    return list(logprobs["rank"][:, 0])


async def test_logprobs_of_events_that_coalesce_are_kept() -> None:
    prompts = Prompts()
    prompts.put(advanced(3, 0, 4))
    prompts.put(advanced(6, 4, 3))
    first = await prompts.next()
    assert (first.computed, ranks(first.prompt_logprobs)) == (6, [0, 1, 2, 3, 4, 5, 6])
    prompts.put(advanced(7, 7, 1))
    second = await prompts.next()
    assert (second.computed, ranks(second.prompt_logprobs)) == (7, [7])


async def test_without_logprobs_there_are_none() -> None:
    prompts = Prompts()
    waiting = asyncio.create_task(prompts.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    prompts.put(PromptAdvanced(ID, BLOCKS, 7, (SampledToken(5), SampledToken(6))))
    got = await waiting
    assert got.prompt_logprobs is None
    assert [token.token_id for token in got.first_tokens] == [5, 6]


async def test_the_first_error_wins() -> None:
    prompts = Prompts()
    prompts.put(advanced(3))
    prompts.fail(HandoffError("first"))
    prompts.put(Failed(ID, InternalError("second")))
    with pytest.raises(HandoffError, match="first"):
        await prompts.next()
