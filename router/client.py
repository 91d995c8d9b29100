"""Writing to a client, and not for ever to one that has stopped reading."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import hdrs, web
from structlog import get_logger

from router.forms import Json

#: What is written in one piece; also what aiohttp lets pile up before it waits for the client.
MAX_WRITE_BYTES = 64 * 1024

log = get_logger()


class ClientWriter:
    """The body of one response. A client that reads nothing for `stall_limit_s` is disconnected, as if it had left.

    It is looked at once per limit, so it is gone after at most twice that time.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse, stall_limit_s: float) -> None:
        self._request = request
        self._response = response
        self._stall_limit_s = stall_limit_s
        #: What was asked to be written.
        self.num_bytes = 0
        #: At the last look; None before the first one.
        self._unread_bytes: int | None = None
        #: Where `write_now` writes; None until aiohttp has written the head.
        self._transport: asyncio.Transport | None = None
        self._is_chunked = False

    async def write(self, *parts: bytes) -> None:
        """Returns when the client has room for more. All of the parts are on their way or none, also if cancelled."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        num_bytes = sum(map(len, parts))
        self.num_bytes += num_bytes
        if num_bytes > MAX_WRITE_BYTES:
            with self._watched():
                await self._write_in_slices(parts)
        elif self._has_room(num_bytes):
            await self._response.write(b"".join(parts))
        else:
            with self._watched():
                await self._response.write(b"".join(parts))
        if self._transport is None:
            self._transport = self._request.transport
            self._is_chunked = self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"

    @property
    def is_clear(self) -> bool:
        """The response has begun, and all of it so far has gone out: `write_now` will not pile anything up."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    def write_now(self, *parts: bytes) -> None:
        """As `write` where `is_clear`, but returns whether or not the client has room for more; not for what is large.

        Straight to the transport: aiohttp's three layers above it take as long as all else about a small event.

        Raises:
            ConnectionResetError: the client left.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client left")
        num_bytes = sum(map(len, parts))
        self.num_bytes += num_bytes
        data = b"".join((b"%x\r\n" % num_bytes, *parts, b"\r\n") if self._is_chunked else parts)
        self._request.writer.output_size += len(data)
        self._transport.write(data)

    def _has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes can be written without waiting for the client, so that nobody needs to watch it."""
        transport = self._request.transport
        if transport is None:
            return False
        low_water, _ = transport.get_write_buffer_limits()
        return transport.get_write_buffer_size() + num_bytes <= low_water

    async def _write_in_slices(self, parts: Sequence[bytes]) -> None:
        """What is large goes as the client takes it: to copy it into the transport's buffer would stop everybody else.

        Cancelled, it first writes the rest, because half of an event would make garbage of what comes after it.
        """
        cancelled: asyncio.CancelledError | None = None
        for part in parts:
            view = memoryview(part)
            for first in range(0, len(view), MAX_WRITE_BYTES):
                try:
                    await self._response.write(view[first : first + MAX_WRITE_BYTES])
                    # The next slice fills up what the client has read of this one.
                    self._unread_bytes = None
                except asyncio.CancelledError as error:  # the slice itself is in the buffer
                    cancelled = error
                except ConnectionError:
                    if cancelled is None:
                        raise
                    raise cancelled from None
        if cancelled is not None:
            raise cancelled

    async def close(self) -> web.StreamResponse:
        """The body is complete."""
        with self._watched():
            await self._response.write_eof()
        return self._response

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """While waiting for the client. What is written then is in the buffer at the first look, so it only shrinks.

        Whoever writes more meanwhile forgets `_unread_bytes`, so that the next look is a first one again.
        """
        self._unread_bytes = None
        self._look_later()
        try:
            yield
        finally:
            self._timer.cancel()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._stall_limit_s, self._look)

    def _look(self) -> None:
        transport = self._request.transport
        if transport is None:
            return
        before, self._unread_bytes = self._unread_bytes, transport.get_write_buffer_size()
        if before is None or self._unread_bytes < before:
            self._look_later()
            return
        log.warning("client_stalled", path=self._request.path, unread_bytes=self._unread_bytes)
        transport.abort()  # closing would wait until the client has read what is buffered


async def send_json(
    request: web.Request, body: Json, headers: dict[str, str], stall_limit_s: float
) -> web.StreamResponse:
    """Answers with a JSON body of any size; returns when the client has taken all but the end of it."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"} | headers)
    response.content_length = sum(map(len, body))
    client = ClientWriter(request, response, stall_limit_s)
    await client.write(*body)
    return await client.close()
