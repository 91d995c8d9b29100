"""The feed of one decode worker: one stream with the chunks of all requests that this router has there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Protocol

import structlog

from common.errors import InternalError, MoerelayError, WorkerLostError
from common.pb import decode_pb2, decode_pb2_grpc
from router.calls import task_group, worker_errors

#: Chunks of one request that may wait here for a client that reads slowly, at most 8 KiB each; more coalesce on the
#: worker. Half of them last a fast reader until the worker has heard that the other half is done with.
WINDOW_CHUNKS = 64
GRANT_FROM_CHUNKS = WINDOW_CHUNKS // 2

#: Requests that stream side by side come to their grants at about the same time, and share a call.
GRANT_DELAY_S = 0.001

#: Of a call that a worker answers at once; one that is lost is repeated.
GRANT_TIMEOUT_S, GRANT_RETRY_S = 5.0, 0.1

log = structlog.get_logger()


class Reader(Protocol):
    """Takes one request's part of a feed, on the event loop, without blocking."""

    def take(self, message: decode_pb2.TokenChunk) -> None:
        """The next chunk that came in the feed; keeps nothing of the message, which is part of a whole batch's."""
        ...

    def fail(self, error: MoerelayError) -> None:
        """`take` raised; the feed goes on without this request."""
        ...

    def lose(self, error: WorkerLostError) -> None:
        """The feed has ended before the request."""
        ...


class Place:
    """One request's place in a feed."""

    def __init__(self, feed: Feed, feed_id: int, tag: int) -> None:
        self.feed_id = feed_id
        self.tag = tag
        self._feed = feed
        self._num_consumed = self._num_granted = 0

    def consumed(self) -> None:
        """One more chunk that came in the feed is done with."""
        self._num_consumed += 1
        if self._num_consumed - self._num_granted >= GRANT_FROM_CHUNKS:
            self._num_granted = self._num_consumed
            self._feed.grant(self)

    @property
    def num_granted(self) -> int:
        return self._num_granted


class Feed:
    """Opened after a heartbeat, for as long as the worker serves it. Requests that begin without it do without it."""

    def __init__(self, stub: decode_pb2_grpc.DecodeAsyncStub, worker_id: Callable[[], str]) -> None:
        self._stub = stub
        self._worker_id = worker_id
        #: 0 while there is no feed.
        self._id = 0
        self._tags = count(1)
        self._readers: dict[int, Reader] = {}
        self._grants: dict[int, int] = {}
        self._granting = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._id != 0

    @contextmanager
    def joined(self, reader: Reader) -> Iterator[Place | None]:
        """A place for as long as the request lives; None if there is no feed now."""
        if not self._id:
            yield None
            return
        place = Place(self, self._id, next(self._tags))
        self._readers[place.tag] = reader
        try:
            yield place
        finally:
            self._readers.pop(place.tag, None)
            self._grants.pop(place.tag, None)

    def grant(self, place: Place) -> None:
        """Tells the worker soon how many of the request's chunks are done with."""
        if place.feed_id == self._id:
            self._grants[place.tag] = place.num_granted
            self._granting.set()

    def open(self) -> None:
        """Opens it if it is not open; called whenever the worker has answered a heartbeat. Not after `close`."""
        if not self._closed and (self._running is None or self._running.done()):
            # Not in the context of whoever asked for this heartbeat: its request's id is in there.
            self._running = asyncio.get_running_loop().create_task(self._run(), context=Context())

    async def close(self) -> None:
        """For good; whoever still reads has lost it."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        """From its beginning to its end."""
        try:
            async with task_group() as group:
                granting = group.create_task(self._send_grants())
                with worker_errors(self._worker_id()):
                    await self._read()
                granting.cancel()
        except MoerelayError as error:
            log.info("feed_ended", worker=self._worker_id(), reason=error.message)

    async def _read(self) -> None:
        """Returns when the worker ends the feed."""
        call = self._stub.Follow(decode_pb2.FollowRequest(window=WINDOW_CHUNKS))
        try:
            while isinstance(batch := await call.read(), decode_pb2.EventBatch):
                self._id = batch.feed_id or self._id
                for message in batch.chunks:
                    # A request that was cancelled a moment ago reads no more.
                    if reader := self._readers.get(message.tag):
                        self._pass_on(message, reader)
        finally:
            call.cancel()
            self._lose_all()

    def _pass_on(self, message: decode_pb2.TokenChunk, reader: Reader) -> None:
        """A request whose chunk cannot be read ends alone, not with all others of the feed."""
        try:
            reader.take(message)
        except Exception as error:
            log.exception("chunk_not_read", worker=self._worker_id(), tag=message.tag)
            del self._readers[message.tag]
            reader.fail(InternalError(f"a chunk from worker {self._worker_id()} cannot be read: {error!r}"))

    def _lose_all(self) -> None:
        self._id = 0
        self._grants.clear()
        error = WorkerLostError(f"worker {self._worker_id()} went away: its feed has ended")
        readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.lose(error)

    async def _send_grants(self) -> None:
        while True:
            await self._granting.wait()
            await asyncio.sleep(GRANT_DELAY_S)  # not to wait for anything, but for what else comes
            self._granting.clear()
            grants, self._grants = self._grants, {}
            if not grants:
                continue
            request = decode_pb2.GrantRequest(feed_id=self._id, consumed=grants)
            try:
                with worker_errors(self._worker_id()):
                    await self._stub.Grant(request, timeout=GRANT_TIMEOUT_S)
            except MoerelayError as error:
                log.info("grant_failed", worker=self._worker_id(), reason=error.message)
                self._grants = grants | self._grants
                self._granting.set()
                await asyncio.sleep(GRANT_RETRY_S)
