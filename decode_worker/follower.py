"""One request whose small chunks go through a router's feed and whose large ones go through the call of its own."""

import asyncio
from collections.abc import Callable, Iterator

from common.pb import decode_pb2
from decode_worker.answer import Answer
from decode_worker.outbox import Outbox

#: Larger chunks would hold up those of other requests, and what a router keeps for a client that does not read.
MAX_SHARED_BYTES = 8 * 1024


class Follower:
    """Numbers the events over both ways, and sends no more than `window` of them into the feed ahead of the router.

    What must wait stays in the outbox, where it coalesces.
    """

    def __init__(
        self,
        tag: int,
        outbox: Outbox,
        answer: Answer,
        *,
        window: int,
        num_sent: int,
        wake_feed: Callable[[], None],
    ) -> None:
        """`num_sent`: events that the call has told before."""
        self._tag = tag
        self._outbox = outbox
        self._answer = answer
        self._window = window
        self._wake_feed = wake_feed
        self._cutting: Iterator[decode_pb2.TokenChunk] = iter(())
        #: Cut, and not sent.
        self._next: decode_pb2.TokenChunk | None = None
        self._num_sent = num_sent
        #: Of these, chunks by the feed: taken by it, written by it, and granted by the router.
        self._num_shared = self._num_written = self._num_granted = 0
        self._error: Exception | None = None
        #: There may be something to do for `next_large`.
        self._attention = asyncio.Event()
        outbox.on_ready = self._ready

    def _ready(self) -> None:
        if self._outbox.failed:
            self._attention.set()
        else:
            self._wake_feed()

    def grant(self, num_consumed: int) -> None:
        """The router is done with the first `num_consumed` chunks that came in the feed."""
        granted = min(num_consumed, self._num_shared)
        if granted > self._num_granted:
            self._num_granted = granted
            self._wake_feed()

    def fail(self, error: Exception) -> None:
        """The request cannot be told on: the feed is gone with what was under way in it, or what it holds is wrong."""
        self._error = self._error or error
        self._attention.set()

    def next_small(self) -> decode_pb2.TokenChunk | None:
        """The next chunk for the feed, if there is one and the router has room for it."""
        if self._num_shared - self._num_granted >= self._window or self._error or self._outbox.failed:
            return None
        try:
            chunk = self._peek()
        except Exception as error:  # noqa: BLE001  # raised again in the request's own call
            self.fail(error)
            return None
        if chunk is None:
            return None
        if chunk.ByteSize() > MAX_SHARED_BYTES:
            self._attention.set()
            return None
        self._num_shared += 1
        chunk.tag = self._tag
        return self._take(chunk)

    def written(self, num_chunks: int) -> None:
        """The feed's call has accepted so many more."""
        self._num_written += num_chunks
        if not self._answer.num_open:
            self._attention.set()

    async def next_large(self) -> decode_pb2.TokenChunk | None:
        """Waits for a chunk that goes through the request's own call; None when everything has been sent.

        Raises:
            MoerelayError: the request failed, or the feed has ended.
            Exception: whatever cutting the answer raised.
        """
        self._wake_feed()
        while True:
            self._attention.clear()
            if error := self._error or self._outbox.error:
                raise error
            chunk = self._peek()
            if chunk is not None and chunk.ByteSize() > MAX_SHARED_BYTES:
                return self._take(chunk)
            if chunk is None and not self._answer.num_open and self._num_written == self._num_shared:
                return None
            await self._attention.wait()

    def _peek(self) -> decode_pb2.TokenChunk | None:
        while self._next is None:
            self._next = next(self._cutting, None)
            if self._next is None:
                batches = self._outbox.take_now()
                if not batches:
                    break
                self._cutting = self._answer.cut(batches)
        return self._next

    def _take(self, chunk: decode_pb2.TokenChunk) -> decode_pb2.TokenChunk:
        chunk.seq = self._num_sent
        self._num_sent += 1
        self._next = None
        return chunk
