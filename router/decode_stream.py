"""What one Generate call tells, in order, whichever way it comes: in the call itself or in the worker's feed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from common.errors import MoerelayError, WorkerLostError
from common.pb import decode_pb2, prefill_pb2
from common.tracing import call_metadata
from router.chunk import Chunk, chunk_from_pb
from router.feed import Place
from router.worker import Worker

GenerateCall = grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateEvent]

#: The call may end a moment before the last chunks come in the feed, where they are under way already.
UNDER_WAY_S = 5.0

DecodeEvent = Chunk | prefill_pb2.Lease | decode_pb2.LocalPrefill


class DecodeStream:
    """Reader of the feed, and of the call beside it. Without a place in the feed it is the call's only reader."""

    def __init__(self, worker: Worker, pass_on_now: Callable[[Chunk], bool] = lambda _: False) -> None:
        """`pass_on_now` may take what comes in the feed while `next` waits for it; False leaves it to `next`."""
        self._worker = worker
        self._pass_on_now = pass_on_now
        self._place: Place | None = None
        self._reading: asyncio.Task[None] | None = None
        #: Came in the feed: chunks with their numbers.
        self._fed: deque[tuple[int, Chunk]] = deque()
        #: Came in the call, which is read on when it has been taken.
        self._own: decode_pb2.GenerateEvent | None = None
        self._own_taken = asyncio.Event()
        self._num_taken = 0
        #: Nobody takes anything any more.
        self._over = False
        self._error: MoerelayError | None = None
        self._feed_error: WorkerLostError | None = None
        self._waiting: asyncio.Future[None] | None = None

    @contextmanager
    def opened(self, request: decode_pb2.GenerateRequest, group: asyncio.TaskGroup) -> Iterator[None]:
        """Makes the call; it is cancelled at the end of the block if it has not ended. `group` outlives the block."""
        with self._worker.feed.joined(self) as place:
            self._place = place
            if place is not None:
                request.feed_id, request.tag = place.feed_id, place.tag
            self._call: GenerateCall = self._worker.decode.Generate(request, metadata=call_metadata())
            try:
                if place is not None:
                    self._reading = group.create_task(self._read_call())
                yield
            finally:
                self.cancel()

    def cancel(self) -> None:
        """Nobody wants more."""
        if self._reading:
            self._reading.cancel()
        self._call.cancel()

    async def next(self) -> DecodeEvent:
        """Raises a MoerelayError as soon as the call fails, or ends although more was to come."""
        if self._place is None:
            return _plain(self._expected(await self._read()))
        while True:
            event = self._take_own() or self._take_fed()
            if event is not None:
                return event
            await self._wait()

    async def ended(self) -> None:
        """Waits for the call's end after everything has come. Raises the MoerelayError that it ended with."""
        if self._reading is None:
            await self._read()
        else:
            self._over = True
            self._own_taken.set()
            await asyncio.wait([self._reading])
            if self._error is not None:
                raise self._error

    def take(self, message: decode_pb2.TokenChunk) -> None:
        chunk = chunk_from_pb(message)
        if self._is_awaited(message.seq) and self._pass_on_now(chunk):
            self._count_fed()
        else:
            self._fed.append((message.seq, chunk))
            self._wake()

    def _is_awaited(self, seq: int) -> bool:
        """Whether `next` waits, and would return that event."""
        if seq != self._num_taken or self._waiting is None or self._waiting.done():
            return False
        return self._reading is not None and not self._reading.done()

    def fail(self, error: MoerelayError) -> None:
        self._error = self._error or error
        self._wake()

    def lose(self, error: WorkerLostError) -> None:
        self._feed_error = error
        self._wake()

    def _take_own(self) -> DecodeEvent | None:
        """What came in the call, if its turn has come."""
        event = self._own
        if event is None:
            return None
        if event.HasField("chunk") and event.chunk.seq != self._num_taken:
            return None
        self._num_taken += 1
        self._own = None
        self._own_taken.set()
        return _plain(event)

    def _take_fed(self) -> Chunk | None:
        if not self._fed or self._fed[0][0] != self._num_taken:
            return None
        self._count_fed()
        return self._fed.popleft()[1]

    def _count_fed(self) -> None:
        assert self._place is not None, "the feed has chunks for those who have a place in it"
        self._num_taken += 1
        self._place.consumed()

    async def _wait(self) -> None:
        """Until there may be something new. What has come is told before an error is."""
        if self._error is not None:
            raise self._error
        assert self._reading is not None, "without a feed nobody waits here"
        # A feed that is lost is the worker's to judge: it ends the call with the cause, or sends everything there if it
        # never knew the feed.
        if self._feed_error is not None and self._reading.done():
            raise self._feed_error
        self._waiting = asyncio.get_running_loop().create_future()
        if not self._reading.done():
            await self._waiting
            return
        try:
            async with asyncio.timeout(UNDER_WAY_S):
                await self._waiting
        except TimeoutError:
            raise self._unfinished() from None

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _read_call(self) -> None:
        """Beside the feed the call tells little: a lease, what is large, an error, its end."""
        try:
            while (event := await self._read()) is not None:
                self._own = event
                self._own_taken.clear()
                self._wake()
                if not self._over:
                    await self._own_taken.wait()
        except MoerelayError as error:
            self._error = self._error or error
        finally:
            self._wake()

    async def _read(self) -> decode_pb2.GenerateEvent | None:
        """The next event of the call; None at its end."""
        try:
            event = await self._call.read()
        except BaseException:
            with self._worker.call():  # entered for a failure only: this may run once per event of every stream
                raise
        return event if isinstance(event, decode_pb2.GenerateEvent) else None

    def _expected(self, event: decode_pb2.GenerateEvent | None) -> decode_pb2.GenerateEvent:
        if event is None:
            raise self._unfinished()
        return event

    def _unfinished(self) -> WorkerLostError:
        return WorkerLostError(f"worker {self._worker.id} ended the stream without a finish reason")


def _plain(event: decode_pb2.GenerateEvent) -> DecodeEvent:
    match event.WhichOneof("event"):
        case "lease":
            return event.lease
        case "local_prefill":
            return event.local_prefill
    return chunk_from_pb(event.chunk)
