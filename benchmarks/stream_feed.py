"""Feeds of the worker without a model: what the decode worker's are, with chunks that are bytes already."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import grpc

from common.pb import decode_pb2

#: Field numbers of `EventBatch.chunks`, `TokenChunk.tag` and `TokenChunk.seq`, with their wire types.
_CHUNKS, _TAG, _SEQ = b"\x12", b"\x48", b"\x50"

Write = Callable[[bytes], Awaitable[None]]


def varint(number: int) -> bytes:
    """As protobuf encodes it."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


class Follower:
    """One stream's way into the feed. A write waits only while the router has not granted more."""

    def __init__(self, feed: "StreamFeed", tag: int, window: int) -> None:
        self._feed = feed
        self._tag = _TAG + varint(tag)
        self._window = window
        self._numbers = count()
        self._num_sent = self._num_consumed = 0
        self._room = asyncio.Event()

    async def write(self, chunk: bytes) -> None:
        """`chunk`: an encoded TokenChunk, without tag and number: they are appended, which merges them."""
        while self._num_sent - self._num_consumed >= self._window:
            self._room.clear()
            await self._room.wait()
        self._num_sent += 1
        self._feed.put(chunk + self._tag + _SEQ + varint(next(self._numbers)))

    def grant(self, num_consumed: int) -> None:
        self._num_consumed = max(self._num_consumed, num_consumed)
        self._room.set()


class StreamFeed:
    """All that was put since the last message goes with the next one."""

    def __init__(self, feed_id: int, window: int) -> None:
        self.feed_id = feed_id
        self._window = window
        self._followers: dict[int, Follower] = {}
        self._chunks: deque[bytes] = deque()
        self._some = asyncio.Event()
        self._none = asyncio.Event()

    def follower(self, tag: int) -> Follower:
        return self._followers.setdefault(tag, Follower(self, tag, self._window))

    def put(self, chunk: bytes) -> None:
        self._chunks.append(_CHUNKS + varint(len(chunk)) + chunk)
        self._none.clear()
        self._some.set()

    async def written(self) -> None:
        """Returns when nothing is left to write."""
        await self._none.wait()

    def grant(self, consumed: dict[int, int]) -> None:
        for tag, num_consumed in consumed.items():
            if follower := self._followers.get(tag):
                follower.grant(num_consumed)

    async def run(self, write: Write) -> None:
        await write(decode_pb2.EventBatch(feed_id=self.feed_id).SerializeToString())
        while True:
            await self._some.wait()
            self._some.clear()
            batch = b"".join(self._chunks)
            self._chunks.clear()
            await write(batch)
            if not self._chunks:
                self._none.set()


class StreamFeeds:
    """By id."""

    def __init__(self) -> None:
        self._feeds: dict[int, StreamFeed] = {}

    async def follow(self, request: decode_pb2.FollowRequest, context: grpc.aio.ServicerContext[Any, bytes]) -> None:
        """Decode.Follow."""
        feed = StreamFeed(len(self._feeds) + 1, request.window)
        self._feeds[feed.feed_id] = feed
        await feed.run(context.write)

    async def grant(self, request: decode_pb2.GrantRequest, context: Any) -> decode_pb2.GrantReply:
        """Decode.Grant."""
        if feed := self._feeds.get(request.feed_id):
            feed.grant(dict(request.consumed))
        return decode_pb2.GrantReply()

    def get(self, feed_id: int) -> StreamFeed | None:
        return self._feeds.get(feed_id)
