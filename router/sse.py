"""Server-sent events: one `data:` line each, sent as a whole, the response opened by the first."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from common.errors import MoerelayError
from router.client import ClientWriter
from router.errors import error_body
from router.forms import Json

#: Makes the JSON of one event, or None if there is nothing to tell; is told whether it is the stream's first.
MakeEvent = Callable[[bool], Awaitable[Json | None]]

#: Bytes around an event's JSON.
FRAMING_BYTES = len(b"data: \n\n")

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies of the nginx kind hold small writes back unless told not to.
    "X-Accel-Buffering": "no",
}


def _framed(json: Json) -> Json:
    """One event; `json` has no newline."""
    return (b"data: ", *json, b"\n\n")


class EventStream:
    """The response to one streaming request. Several choices may send at the same time; events never mix."""

    def __init__(self, request: web.Request, headers: dict[str, str], stall_limit_s: float) -> None:
        self._response = web.StreamResponse(headers=_HEADERS | headers)
        self._client = ClientWriter(request, self._response, stall_limit_s)
        self._lock = asyncio.Lock()
        self._started = False
        request[EVENT_STREAM] = self

    @property
    def opened(self) -> bool:
        """Whether the status line has gone out, after which an error can only be an event."""
        return self._response.prepared

    @property
    def num_bytes(self) -> int:
        """Of all events so far."""
        return self._client.num_bytes

    async def send(self, json: Json) -> None:
        """Returns when the client has room for more. Raises ConnectionResetError if it left."""
        async with self._lock:
            self._started = True
            await self._client.write(*_framed(json))

    @property
    def is_clear(self) -> bool:
        """Whether `send_now` may be used: the stream has begun, and nothing that was sent waits to go out."""
        return not self._lock.locked() and self._client.is_clear

    def send_now(self, json: Json) -> None:
        """As `send`, without waiting. Raises ConnectionResetError if the client left."""
        self._client.write_now(b"data: ", *json, b"\n\n")

    async def send_made(self, make: MakeEvent) -> None:
        """As `send`, with an event that is made when its turn has come."""
        async with self._lock:
            event = await make(not self._started)
            if event is not None:
                self._started = True
                await self._client.write(*_framed(event))

    async def finish(self) -> web.StreamResponse:
        """Closes a complete stream."""
        await self.send((b"[DONE]",))
        return await self._client.close()

    async def fail(self, error: MoerelayError) -> web.StreamResponse:
        """Closes a broken stream, and the connection: no finish reason, no [DONE]."""
        await self.send((error_body(error),))
        self._response.force_close()
        return await self._client.close()


#: How the middleware finds the stream that an error broke.
EVENT_STREAM = web.RequestKey("event_stream", EventStream)
