"""Server-sent events: one `data:` line each, sent as a whole, the response opened by the first."""

import asyncio

from aiohttp import web

from common.errors import MoerelayError
from router.errors import error_body

#: Bytes around an event's JSON.
FRAMING_BYTES = len(b"data: \n\n")

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies of the nginx kind hold small writes back unless told not to.
    "X-Accel-Buffering": "no",
}


def encode_event(json: bytes) -> bytes:
    """One event; `json` has no newline."""
    return b"data: " + json + b"\n\n"


class EventStream:
    """The response to one streaming request. Several choices may send at the same time; events never mix."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS | headers)
        self._lock = asyncio.Lock()
        request[EVENT_STREAM] = self
        #: Whether some event has been handed in; the next one is not the first.
        self.started = False

    @property
    def opened(self) -> bool:
        """Whether the status line has gone out, after which an error can only be an event."""
        return self._response.prepared

    async def send(self, json: bytes) -> None:
        """Returns when the client has room for more. Raises ConnectionResetError if it left."""
        self.started = True
        async with self._lock:
            if not self.opened:
                await self._response.prepare(self._request)
            await self._response.write(encode_event(json))

    async def finish(self) -> web.StreamResponse:
        """Closes a complete stream."""
        await self.send(b"[DONE]")
        await self._response.write_eof()
        return self._response

    async def fail(self, error: MoerelayError) -> web.StreamResponse:
        """Closes a broken stream, and the connection: no finish reason, no [DONE]."""
        await self.send(error_body(error))
        self._response.force_close()
        await self._response.write_eof()
        return self._response


#: How the middleware finds the stream that an error broke.
EVENT_STREAM = web.RequestKey("event_stream", EventStream)
