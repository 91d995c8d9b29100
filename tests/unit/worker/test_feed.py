"""The decode worker's feeds: one message for many requests, and no request that holds up another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from common.engine.request import Failed, Progress, RequestId
from common.errors import InternalError, InvalidRequestError, WorkerLostError
from common.messages import tokens_from_pb
from common.pb import decode_pb2
from common.sampling import Finish, FinishReason, SampledToken
from decode_worker.answer import Answer
from decode_worker.feed import MAX_BATCH_BYTES, Feed, Feeds
from decode_worker.follower import MAX_SHARED_BYTES, Follower
from decode_worker.outbox import Outbox

ID = RequestId("r")
LENGTH = Finish(FinishReason.LENGTH)
#: Of one token, more than a chunk may have that goes through the feed.
LARGE_ROWS = MAX_SHARED_BYTES // 4 + 1


class Reader:
    """What a router reads; while `go` is clear it takes nothing more."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.batches: list[decode_pb2.EventBatch] = []
        self.go = asyncio.Event()
        self.go.set()

    async def write(self, batch: decode_pb2.EventBatch) -> None:
        await self.go.wait()
        self.batches.append(batch)

    def tokens(self, tag: int) -> list[list[int]]:
        """Chunk by chunk."""
        chunks = [chunk for batch in self.batches for chunk in batch.chunks if chunk.tag == tag]
        return [[token.token_id for token in tokens_from_pb(chunk)] for chunk in chunks]


@asynccontextmanager
async def running(window: int = 4) -> AsyncIterator[Reader]:
    reader = Reader(Feed(window))
    task = asyncio.create_task(reader.feed.run(reader.write))
    await settled()
    try:
        yield reader
    finally:
        task.cancel()
        await asyncio.wait([task])


async def settled() -> None:
    """More turns of the loop than anything here needs."""
    for _ in range(20):
        await asyncio.sleep(0)


def progress(token: int, rows: int = 1, finish: Finish | None = None) -> Progress:
    return Progress(ID, (SampledToken(token),), np.zeros((rows, 2, 2), np.uint8), finish)


class Request:
    """One that follows."""

    def __init__(self, feed: Feed, tag: int, *, num_sent: int = 0) -> None:
        self.outbox = Outbox()
        self._followed = feed.followed(tag, self.outbox, Answer(1, lambda _: None), num_sent=num_sent)
        self.follower: Follower = self._followed.__enter__()
        self.own: list[decode_pb2.TokenChunk] = []

    async def stream(self) -> None:
        """As the call of Generate does."""
        while (chunk := await self.follower.next_large()) is not None:
            self.own.append(chunk)

    def leave(self) -> None:
        self._followed.__exit__(None, None, None)


async def test_a_step_is_one_message() -> None:
    async with running() as reader:
        requests = [Request(reader.feed, tag) for tag in (1, 2, 3)]
        for step in range(2):
            for request in requests:
                request.outbox.put(progress(step))
            await settled()
    [hello, *steps] = reader.batches
    assert hello.feed_id == reader.feed.id != 0
    assert [[(chunk.tag, chunk.seq) for chunk in step.chunks] for step in steps] == [
        [(1, 0), (2, 0), (3, 0)],
        [(1, 1), (2, 1), (3, 1)],
    ]


async def test_who_is_granted_nothing_waits_and_coalesces_while_others_go_on() -> None:
    async with running(window=2) as reader:
        slow, fast = Request(reader.feed, 1), Request(reader.feed, 2)
        for step in range(6):
            for request in (slow, fast):
                request.outbox.put(progress(step))
            await settled()
            reader.feed.grant({2: step + 1, 9: 7})
        assert reader.tokens(1) == [[0], [1]]
        assert reader.tokens(2) == [[0], [1], [2], [3], [4], [5]]
        reader.feed.grant({1: 1})
        reader.feed.grant({1: 0})
        await settled()
        assert reader.tokens(1) == [[0], [1], [2, 3, 4, 5]]


async def test_a_grant_of_more_than_was_sent_grants_no_more_than_that() -> None:
    async with running(window=1) as reader:
        request = Request(reader.feed, 1)
        reader.feed.grant({1: 100})
        for step in range(3):
            request.outbox.put(progress(step))
            await settled()
        assert reader.tokens(1) == [[0]]


async def test_a_router_that_reads_nothing_costs_no_messages() -> None:
    async with running(window=64) as reader:
        reader.go.clear()
        requests = [Request(reader.feed, tag) for tag in (1, 2)]
        for step in range(5):
            for request in requests:
                request.outbox.put(progress(step))
            await settled()
        reader.go.set()
        await settled()
        assert reader.tokens(1) == reader.tokens(2) == [[0], [1, 2, 3, 4]]


async def test_large_chunks_go_through_the_requests_own_call_in_one_numbering() -> None:
    async with running() as reader:
        request = Request(reader.feed, 1, num_sent=1)
        streaming = asyncio.create_task(request.stream())
        request.outbox.put(progress(0, rows=LARGE_ROWS))
        await settled()
        request.outbox.put(progress(1))
        await settled()
        request.outbox.put(progress(2, finish=LENGTH))
        await asyncio.wait_for(streaming, 10)
        [large] = request.own
        assert (large.seq, large.tag, large.num_rows) == (1, 0, LARGE_ROWS)
        assert reader.tokens(1) == [[1], [2]]
        assert [chunk.seq for batch in reader.batches for chunk in batch.chunks] == [2, 3]


@pytest.mark.parametrize("rows", [1, LARGE_ROWS])
async def test_a_call_ends_after_its_last_chunk_was_accepted(rows: int) -> None:
    async with running() as reader:
        request = Request(reader.feed, 1)
        streaming = asyncio.create_task(request.stream())
        reader.go.clear()
        request.outbox.put(progress(0))
        await settled()
        request.outbox.put(progress(1, rows, LENGTH))
        await settled()
        assert not streaming.done()
        reader.go.set()
        await asyncio.wait_for(streaming, 10)
        assert reader.tokens(1) + [[token.token_id for token in tokens_from_pb(chunk)] for chunk in request.own] == [
            [0],
            [1],
        ]


async def test_a_call_ends_although_its_last_chunk_filled_the_window() -> None:
    async with running(window=1) as reader:
        request = Request(reader.feed, 1)
        streaming = asyncio.create_task(request.stream())
        request.outbox.put(progress(0, finish=LENGTH))
        await asyncio.wait_for(streaming, 10)
        assert reader.tokens(1) == [[0]]


async def test_a_call_ends_although_its_last_chunk_filled_the_message() -> None:
    async with running(window=64) as reader:
        requests = [Request(reader.feed, tag) for tag in range(1, 41)]
        streaming = [asyncio.create_task(request.stream()) for request in requests]
        await settled()
        for request in requests:  # all of them before the feed collects what there is
            request.outbox.put(progress(0, rows=LARGE_ROWS - 100, finish=LENGTH))
        await asyncio.wait_for(asyncio.gather(*streaming), 10)
        assert len(reader.batches) > 2
        assert max(batch.ByteSize() for batch in reader.batches) >= MAX_BATCH_BYTES


async def test_an_error_ends_the_call_and_nobody_elses() -> None:
    async with running() as reader:
        failing, other = Request(reader.feed, 1), Request(reader.feed, 2)
        streaming = asyncio.create_task(failing.stream())
        await settled()
        failing.outbox.put(Failed(ID, InternalError("a row is missing")))
        with pytest.raises(InternalError, match="a row is missing"):
            await asyncio.wait_for(streaming, 10)
        other.outbox.put(progress(7))
        await settled()
        assert reader.tokens(2) == [[7]]


@pytest.mark.parametrize("how", ["cancelled", "ended"])
async def test_the_end_of_a_feed_fails_whoever_follows(how: str) -> None:
    feed = Feed(4)
    reader = Reader(feed)
    running_feed = asyncio.create_task(feed.run(reader.write))
    request = Request(feed, 1)
    streaming = asyncio.create_task(request.stream())
    await settled()
    feed.end() if how == "ended" else running_feed.cancel()
    await asyncio.wait([running_feed])
    with pytest.raises(WorkerLostError, match="feed"):
        await asyncio.wait_for(streaming, 10)
    request.outbox.put(progress(1))  # the engine may be ahead of the cancellation
    request.leave()


async def test_a_request_that_left_is_forgotten() -> None:
    async with running() as reader:
        request = Request(reader.feed, 1)
        request.outbox.put(progress(0))
        request.leave()
        request.outbox.put(progress(5))
        await settled()
        assert reader.tokens(1) == []
        assert len(request.outbox.take_now()[0].tokens) == 2
        again = Request(reader.feed, 1)
        again.outbox.put(progress(1))
        await settled()
        assert reader.tokens(1) == [[1]]


async def test_an_answer_that_cannot_be_cut_fails_its_request_alone() -> None:
    async with running() as reader:
        bad, good = Request(reader.feed, 1), Request(reader.feed, 2)
        streaming = asyncio.create_task(bad.stream())
        bad.outbox.put(progress(-1))  # no token id
        good.outbox.put(progress(3))
        await settled()
        assert (reader.tokens(1), reader.tokens(2)) == ([], [[3]])
        with pytest.raises(ValueError, match="-1"):
            await streaming
        good.outbox.put(progress(4))
        await settled()
        assert reader.tokens(2) == [[3], [4]]


async def test_messages_are_bounded_and_everybody_gets_a_turn() -> None:
    async with running(window=64) as reader:
        rows = MAX_SHARED_BYTES // 4 - 16
        num = 4 * MAX_BATCH_BYTES // MAX_SHARED_BYTES
        requests = [Request(reader.feed, tag) for tag in range(1, num + 1)]
        for request in requests:
            request.outbox.put(progress(0, rows))
        await settled()
        assert [reader.tokens(tag) for tag in range(1, num + 1)] == [[[0]]] * num
        assert all(batch.ByteSize() < MAX_BATCH_BYTES + 2 * MAX_SHARED_BYTES for batch in reader.batches)


async def test_what_makes_no_sense_is_refused() -> None:
    feeds = Feeds()
    with pytest.raises(InvalidRequestError, match="window"), feeds.opened(0):
        pass
    with feeds.opened(1) as feed:
        assert feeds.get(feed.id) is feed
        request = Request(feed, 1)
        with pytest.raises(InvalidRequestError, match="tag 1"):
            Request(feed, 1)
        request.leave()
    assert feeds.get(feed.id) is None
    assert not len(feeds)
