"""Writing to a client: in pieces, and not for ever to one that has stopped reading."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

#: A client must take this much within the time limit: far less than any that reads, even over a slow line.
PIECE_BYTES = 256 * 1024


class ClientWriter:
    """The body of one response. A client that takes no piece of it for `stall_limit_s` counts as gone."""

    def __init__(self, request: web.Request, response: web.StreamResponse, stall_limit_s: float) -> None:
        self._request = request
        self._response = response
        self._stall_limit_s = stall_limit_s

    async def write(self, data: bytes) -> None:
        """Returns when the client has room for more. Raises ConnectionResetError if it left or stopped reading."""
        if not self._response.prepared:
            async with self._patience():
                await self._response.prepare(self._request)
        view = memoryview(data)
        for at in range(0, len(data), PIECE_BYTES):
            async with self._patience():
                await self._response.write(view[at : at + PIECE_BYTES])

    async def close(self) -> web.StreamResponse:
        """The body is complete."""
        async with self._patience():
            await self._response.write_eof()
        return self._response

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._stall_limit_s):
                yield
        except TimeoutError:
            # Closing would first wait until the client has read what is buffered.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client has read nothing for {self._stall_limit_s:g} s") from None


async def send_json(
    request: web.Request, body: bytes, headers: dict[str, str], stall_limit_s: float
) -> web.StreamResponse:
    """Answers with a JSON body of any size. Raises ConnectionResetError as `ClientWriter.write` does."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"} | headers)
    response.content_length = len(body)
    client = ClientWriter(request, response, stall_limit_s)
    await client.write(body)
    return await client.close()
