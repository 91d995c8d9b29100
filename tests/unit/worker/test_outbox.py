"""The decode worker's outbox: tokens and rows coalesce together, an error ends everything."""

import asyncio

import numpy as np
import pytest

from common.engine.request import BlocksLeased, Failed, Progress, RequestId
from common.errors import InternalError, WorkerLostError
from common.kv.pool import BlockId
from common.sampling import Finish, FinishReason, SampledToken
from decode_worker.outbox import Outbox

ID = RequestId("r")


def progress(token: int, rows: int, finish: Finish | None = None) -> Progress:
    return Progress(ID, (SampledToken(token),), np.full((rows, 2, 2), token, np.uint8), finish)


async def test_tokens_and_rows_coalesce() -> None:
    outbox = Outbox()
    outbox.put(progress(1, rows=3))
    outbox.put(progress(2, rows=1, finish=Finish(FinishReason.LENGTH)))
    batch = await outbox.take()
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
    first = await taking
    assert first.rows_TLK is None
    outbox.put(progress(2, rows=1))
    second = await outbox.take()
    assert [t.token_id for t in second.tokens] == [2]


async def test_a_failure_voids_what_was_not_read() -> None:
    outbox = Outbox()
    outbox.put(progress(1, rows=3))
    outbox.put(Failed(ID, InternalError("first")))
    outbox.fail(WorkerLostError("second"))
    with pytest.raises(InternalError, match="first"):
        await outbox.take()


async def test_lease() -> None:
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.leased())
    await asyncio.sleep(0)
    outbox.put(BlocksLeased(ID, (BlockId(4),)))
    assert await waiting == (4,)


async def test_no_lease_for_a_request_that_ended() -> None:
    aborted, failed = Outbox(), Outbox()
    aborted.put(Progress(ID, (), None, Finish(FinishReason.ABORT)))
    assert await aborted.leased() is None
    assert (await aborted.take()).finish == Finish(FinishReason.ABORT)
    failed.fail(WorkerLostError("gone"))
    with pytest.raises(WorkerLostError):
        await failed.leased()
