"""The feeds of a fake decode worker: what proto/decode.proto says of them, in as few lines as possible."""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

import grpc

from common.errors import MoerelayError, WorkerLostError
from common.pb import decode_pb2

Context = grpc.aio.ServicerContext[Any, Any]

#: Chunks that are larger go through the request's own call.
SHARED_BYTES = 8 * 1024


class FakeFeed:
    """One stream to one router process."""

    def __init__(self, feed_id: int, window: int) -> None:
        self.feed_id = feed_id
        self.window = window
        self.queue: asyncio.Queue[decode_pb2.TokenChunk] = asyncio.Queue()
        self.num_sent: dict[int, int] = defaultdict(int)
        self.num_written: dict[int, int] = defaultdict(int)
        self.consumed: dict[int, int] = defaultdict(int)
        self.changed = asyncio.Condition()
        self.over = asyncio.Event()
        #: Messages so far, the first one included, and chunks in them.
        self.num_messages = 0
        self.num_chunks = 0

    async def run(self, context: Context) -> None:
        await context.write(decode_pb2.EventBatch(feed_id=self.feed_id))
        while True:
            chunks = [await self.queue.get()]
            while not self.queue.empty():
                chunks.append(self.queue.get_nowait())
            self.num_messages += 1
            self.num_chunks += len(chunks)
            await context.write(decode_pb2.EventBatch(chunks=chunks))
            async with self.changed:
                for chunk in chunks:
                    self.num_written[chunk.tag] += 1
                self.changed.notify_all()

    async def send(self, chunk: decode_pb2.TokenChunk) -> None:
        """Waits until the window has room."""
        tag = chunk.tag
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_sent[tag] - self.consumed[tag] < self.window)
        self.num_sent[tag] += 1
        self.queue.put_nowait(chunk)

    async def written(self, tag: int) -> None:
        """Waits until everything that was sent for the request is on its way."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_written[tag] == self.num_sent[tag])

    async def grant(self, consumed: dict[int, int]) -> None:
        async with self.changed:
            self.consumed.update(consumed)
            self.changed.notify_all()


class FollowingContext:
    """Of a Generate call: chunks go through the feed that the request follows, if they are small and it is open."""

    def __init__(self, context: Context, feed: FakeFeed | None, tag: int) -> None:
        self._context = context
        self._feed = feed
        self._tag = tag
        self._num_events = 0

    async def write(self, event: decode_pb2.GenerateEvent) -> None:
        seq = self._num_events
        self._num_events += 1
        if not event.HasField("chunk"):
            await self._context.write(event)
            return
        event.chunk.seq = seq
        if self._feed is None or event.chunk.ByteSize() > SHARED_BYTES:
            await self._context.write(event)
        else:
            event.chunk.tag = self._tag
            await self._feed.send(event.chunk)

    async def run(self, answer: Coroutine[Any, Any, None]) -> None:
        """To its end, or to that of the feed, which fails it."""
        if self._feed is None:
            await answer
            return
        over = asyncio.create_task(self._feed.over.wait())
        answering = asyncio.create_task(self._written(answer, self._feed))
        try:
            await asyncio.wait([over, answering], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise WorkerLostError("the feed has ended")
            await answering
        finally:
            over.cancel()
            answering.cancel()

    async def _written(self, answer: Coroutine[Any, Any, None], feed: FakeFeed) -> None:
        try:
            await answer
        except MoerelayError:
            await feed.written(self._tag)
            raise
        await feed.written(self._tag)


class FakeFeeds:
    """Mixin of a fake worker: its feeds, in the order in which they were opened."""

    def __init__(self) -> None:
        self.feeds: list[FakeFeed] = []
        self.serves_feeds = True
        #: So many of the next grants are answered with an error.
        self.num_grants_to_lose = 0
        self._none_open = asyncio.Event()
        self._open: dict[int, FakeFeed] = {}
        self._forgotten: set[int] = set()
        self._ends: dict[int, asyncio.Event] = {}

    async def Follow(self, request: decode_pb2.FollowRequest, context: Context) -> None:
        if not self.serves_feeds:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no feeds here")
        feed = FakeFeed(1000 + len(self.feeds), request.window)
        self.feeds.append(feed)
        self._open[feed.feed_id] = feed
        self._none_open.clear()
        end = self._ends[feed.feed_id] = asyncio.Event()
        running = asyncio.create_task(feed.run(context))
        ending = asyncio.create_task(end.wait())
        try:
            await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            ending.cancel()
            feed.over.set()
            del self._open[feed.feed_id]
            if not self._open:
                self._none_open.set()

    async def Grant(self, request: decode_pb2.GrantRequest, context: Context) -> decode_pb2.GrantReply:
        if self.num_grants_to_lose:
            self.num_grants_to_lose -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        if feed := self._open.get(request.feed_id):
            await feed.grant(dict(request.consumed))
        return decode_pb2.GrantReply()

    def end_feeds(self) -> None:
        """Ends every feed, and no request."""
        for end in self._ends.values():
            end.set()

    def forget_feeds(self) -> None:
        """Who asks for one of those that are open from now on gets everything in the call."""
        self._forgotten |= self._open.keys()

    async def until_no_feed(self) -> None:
        """Returns when the last feed that was open has ended."""
        await self._none_open.wait()

    def following(self, request: decode_pb2.GenerateRequest, context: Context) -> FollowingContext | None:
        """What a Generate call writes to, if it follows a feed."""
        feed = None if request.feed_id in self._forgotten else self._open.get(request.feed_id)
        return FollowingContext(context, feed, request.tag) if request.feed_id else None
