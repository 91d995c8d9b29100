"""The feed of one router process: the small chunks of all requests that follow it, together in one stream."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from common.errors import InvalidRequestError, WorkerLostError
from common.pb import decode_pb2
from decode_worker.answer import Answer
from decode_worker.follower import Follower
from decode_worker.outbox import Outbox

#: Of one message, unless the last chunk in it goes beyond: the router is not kept from everything else for longer.
MAX_BATCH_BYTES = 128 * 1024

Write = Callable[[decode_pb2.EventBatch], Awaitable[None]]


class Feed:
    """Whoever follows says when it is ready; `run` then takes what it has. One that is not ready costs nothing."""

    def __init__(self, window: int) -> None:
        """`window`: see `Follower`. The id is random, because one of before a restart must not be another's now."""
        self.id = secrets.randbits(63) + 1
        self._window = window
        self._followers: dict[int, Follower] = {}
        #: In the order in which they became so.
        self._ready: dict[Follower, None] = {}
        self._wake = asyncio.Event()
        self._over = False

    @contextmanager
    def followed(self, tag: int, outbox: Outbox, answer: Answer, *, num_sent: int = 0) -> Iterator[Follower]:
        """For as long as the request lives, of which the call has told `num_sent` events.

        Raises:
            InvalidRequestError: the tag is taken.
        """
        if tag in self._followers:
            raise InvalidRequestError(f"tag {tag} is in use", param="tag")
        follower = Follower(
            tag,
            outbox,
            answer,
            window=self._window,
            num_sent=num_sent,
            wake_feed=lambda: self._is_ready(follower),
        )
        self._followers[tag] = follower
        try:
            yield follower
        finally:
            outbox.on_ready = None
            del self._followers[tag]
            self._ready.pop(follower, None)

    def _is_ready(self, follower: Follower) -> None:
        self._ready[follower] = None
        self._wake.set()

    def grant(self, consumed: Mapping[int, int]) -> None:
        """By tag: how many chunks of a request the router is done with."""
        for tag, num_consumed in consumed.items():
            if follower := self._followers.get(tag):
                follower.grant(num_consumed)

    async def run(self, write: Write) -> None:
        """Writes what there is, until `end` or a cancellation; whoever still follows then fails."""
        try:
            await write(decode_pb2.EventBatch(feed_id=self.id))
            while not self._over:
                await self._wake.wait()
                self._wake.clear()
                while (batch := self._collect())[0]:
                    await write(decode_pb2.EventBatch(chunks=batch[0]))
                    for follower, num_chunks in batch[1].items():
                        follower.written(num_chunks)
        finally:
            self._over = True
            for follower in self._followers.values():
                follower.fail(WorkerLostError("the feed that carried this request's tokens has ended"))

    def end(self) -> None:
        self._over = True
        self._wake.set()

    def _collect(self) -> tuple[list[decode_pb2.TokenChunk], dict[Follower, int]]:
        """Chunks for one message, and how many of them are whose. Who has more than fits is asked again last."""
        chunks: list[decode_pb2.TokenChunk] = []
        counts: dict[Follower, int] = {}
        room = MAX_BATCH_BYTES
        for _ in range(len(self._ready)):
            follower = next(iter(self._ready))
            del self._ready[follower]
            num_before = len(chunks)
            for chunk in iter(follower.next_small, None):
                chunks.append(chunk)
                room -= chunk.ByteSize()
                if room <= 0:
                    self._ready[follower] = None
                    break
            if len(chunks) > num_before:
                counts[follower] = len(chunks) - num_before
            if room <= 0:
                break
        return chunks, counts


class Feeds:
    """Those that are open on this worker, by id."""

    def __init__(self) -> None:
        self._by_id: dict[int, Feed] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def opened(self, window: int) -> Iterator[Feed]:
        """Raises InvalidRequestError if nothing could ever be sent."""
        if window < 1:
            raise InvalidRequestError("a feed needs a window of at least 1 chunk", param="window")
        feed = Feed(window)
        self._by_id[feed.id] = feed
        try:
            yield feed
        finally:
            del self._by_id[feed.id]

    def get(self, feed_id: int) -> Feed | None:
        return self._by_id.get(feed_id)

    def end(self) -> None:
        """All of them, because the worker stops."""
        for feed in self._by_id.values():
            feed.end()
