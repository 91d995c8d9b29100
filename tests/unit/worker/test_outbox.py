"""The decode worker's outbox: tokens and rows coalesce together, an error ends everything."""

import asyncio

import numpy as np
import pytest

from common.engine.request import BlocksLeased, Failed, PrefillsLocally, Progress, RequestId
from common.errors import InternalError, WorkerLostError
from common.kv.pool import BlockId
from common.prompt_logprobs import PromptLogprobs, empty
from common.sampling import Finish, FinishReason, SampledToken
from decode_worker.outbox import Outbox

ID = RequestId("r")


def progress(token: int, rows: int, finish: Finish | None = None) -> Progress:
    return Progress(ID, (SampledToken(token),), np.full((rows, 2, 2), token, np.uint8), finish)


async def test_tokens_and_rows_coalesce() -> None:
    outbox = Outbox()
    outbox.put(progress(1, rows=3))
    outbox.put(progress(2, rows=1, finish=Finish(FinishReason.LENGTH)))
    [batch] = await outbox.take()
    assert [t.token_id for t in batch.tokens] == [1, 2]
    assert batch.rows_TLK is not None
    assert batch.rows_TLK[:, 0, 0].tolist() == [1, 1, 1, 2]
    assert batch.finish == Finish(FinishReason.LENGTH)


async def test_take_waits_and_starts_afresh() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put(progress(1, rows=0))
    [first] = await taking
    assert first.rows_TLK is None
    outbox.put(progress(2, rows=1))
    [second] = await outbox.take()
    assert [t.token_id for t in second.tokens] == [2]


async def test_a_failure_voids_what_was_not_read() -> None:
    outbox = Outbox()
    outbox.put(progress(1, rows=3))
    outbox.put(Failed(ID, InternalError("first")))
    outbox.fail(WorkerLostError("second"))
    with pytest.raises(InternalError, match="first"):
        await outbox.take()


@pytest.mark.parametrize("event", [BlocksLeased(ID, (BlockId(4),)), PrefillsLocally(ID, 32)])
async def test_admission(event: BlocksLeased | PrefillsLocally) -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.admitted())
    await asyncio.sleep(0)
    outbox.put(event)
    assert await waiting == event


async def test_no_lease_for_a_request_that_ended() -> None:
    aborted, failed = Outbox(), Outbox()
    aborted.put(Progress(ID, (), None, Finish(FinishReason.ABORT)))
    assert await aborted.admitted() is None
    assert [batch.finish for batch in await aborted.take()] == [Finish(FinishReason.ABORT)]
    failed.fail(WorkerLostError("gone"))
    with pytest.raises(WorkerLostError):
        await failed.admitted()


async def test_choices_do_not_mix() -> None:
    outbox = Outbox(3)
    outbox.put(Progress(ID, (SampledToken(7),), None, None, 2))
    outbox.put(Progress(ID, (SampledToken(5),), None, None, 0))
    outbox.put(Progress(ID, (SampledToken(8),), None, Finish(FinishReason.LENGTH), 2))
    batches = await outbox.take()
    assert [(b.choice, [t.token_id for t in b.tokens]) for b in batches] == [(0, [5]), (2, [7, 8])]
    assert [b.finish for b in batches] == [None, Finish(FinishReason.LENGTH)]


async def test_the_end_of_one_choice_is_not_the_end_of_the_request() -> None:
    outbox = Outbox(2)
    waiting = asyncio.create_task(outbox.admitted())
    outbox.put(Progress(ID, (), None, Finish(FinishReason.ABORT), 1))
    for _ in range(10):  # more than the hops between the event and the end of a wait for it
        await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(BlocksLeased(ID, (BlockId(4),)))
    assert await waiting == BlocksLeased(ID, (BlockId(4),))


async def test_prompt_logprobs_coalesce_whichever_way_they_come() -> None:
    outbox, entries = Outbox(2), empty(4, 0)
    entries["token_id"] = [[0], [1], [2], [3]]
    outbox.put(Progress(ID, (), None, None, 0, PromptLogprobs(entries[:1])))
    outbox.put_prompt_logprobs(PromptLogprobs(entries[1:4]))
    [batch] = await outbox.take()
    assert batch.prompt_logprobs is not None
    assert batch.prompt_logprobs.tobytes() == entries.tobytes()


async def test_prompt_logprobs_travel_with_the_first_choice_that_is_left() -> None:
    outbox = Outbox(2)
    outbox.put(Progress(ID, (), None, Finish(FinishReason.ABORT), 0))
    outbox.put_prompt_logprobs(empty(1, 0))
    aborted, left = await outbox.take()
    assert (aborted.prompt_logprobs, left.choice) == (None, 1)
    assert left.prompt_logprobs is not None
    assert len(left.prompt_logprobs) == 1
    outbox.put(Progress(ID, (), None, Finish(FinishReason.ABORT), 1))
    outbox.put_prompt_logprobs(empty(1, 0))
    [batch] = await outbox.take()
    assert batch.prompt_logprobs is None


async def test_cached_tokens_stay_with_the_choices_first_token() -> None:
    outbox = Outbox(2)
    for choice in (0, 1):
        outbox.put(Progress(ID, (SampledToken(5),), None, None, choice, None, 32))
    outbox.put(Progress(ID, (SampledToken(6),), None, None, 0))
    assert [(b.choice, b.num_cached) for b in await outbox.take()] == [(0, 32), (1, 32)]
    outbox.put(Progress(ID, (SampledToken(7),), None, None, 0))
    assert [b.num_cached for b in await outbox.take()] == [0]
