"""Many streams from one process, read as raw bytes, so that the reader does not become what is measured."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

#: The last chunk of a chunked body.
_BODY_END = b"0\r\n\r\n"
_EVENT_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class StreamRead:
    """One answer: its events, and when the first and the last byte of them came, by `time.perf_counter`."""

    num_events: int
    first: float
    last: float


class _Reader(asyncio.Protocol):
    """Sends one request and counts what comes back."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._status = b""
        self._num_events = 0
        self._first = 0.0
        self.done: asyncio.Future[StreamRead] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._status = self._status or data[9:12]
        # A separator may be cut in two, but never counted twice: the tail is shorter than one.
        num_events = (self._tail[-1:] + data).count(_EVENT_END)
        if num_events:
            self._first = self._first or time.perf_counter()
            self._num_events += num_events
        self._tail = (self._tail + data)[-len(_BODY_END) :]
        if self._tail == _BODY_END or self._status != b"200":
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError("the server closed the connection in mid stream"))

    def _finish(self) -> None:
        if self.done.done():
            return
        if self._status != b"200":
            self.done.set_exception(RuntimeError(f"status {self._status.decode()}: {self._tail!r}"))
        else:
            self.done.set_result(StreamRead(self._num_events, self._first, time.perf_counter()))
        self._transport.close()


async def read_streams(url: str, body: Mapping[str, object], num_streams: int) -> list[StreamRead]:
    """Posts the body `num_streams` times at once, each on a connection of its own.

    Raises:
        RuntimeError: an answer was no complete stream.
    """
    parts, content = urlsplit(url), json.dumps(body).encode()
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    loop = asyncio.get_running_loop()

    async def read() -> StreamRead:
        _, reader = await loop.create_connection(partial(_Reader, request), parts.hostname or "", parts.port or 80)
        return await reader.done

    return list(await asyncio.gather(*(read() for _ in range(num_streams))))
