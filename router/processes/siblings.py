"""What one router process asks the others: over HTTP on unix sockets in a directory that only they can enter."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from structlog import get_logger

from common.errors import UnavailableError

#: Of an answer that needs no worker.
LOCAL_TIMEOUT_S = 3.0
#: An abort tries again until its workers have heard of the request.
ABORT_TIMEOUT_S = 15.0
#: What takes long there (pausing, loading weights) takes as long as it takes.
_FORWARD_TIMEOUT = aiohttp.ClientTimeout(total=None)

#: Headers of one connection, not of the message.
_HOP_HEADERS = frozenset({"Connection", "Content-Length", "Host", "Keep-Alive", "Transfer-Encoding", "Expect"})

AnswerT = TypeVar("AnswerT")

log = get_logger()


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One router process. `complaint`: why it is not ready; None if it is."""

    in_flight: int
    draining: bool
    complaint: str | None


@dataclass(frozen=True, slots=True)
class Aborted:
    """Ids that were live on the process and have been told to stop."""

    aborted: list[str]


def socket_path(directory: Path, index: int) -> Path:
    """Where the process of that index listens for its siblings."""
    return directory / f"{index}.sock"


class Siblings:
    """The other processes of this router; there may be none. Process 0 carries out what concerns the whole cluster.

    A process that is being restarted does not answer; it is left out of whatever is asked of all.
    """

    def __init__(self, index: int, others: Mapping[int, aiohttp.ClientSession]) -> None:
        self.index = index
        self._others = others

    @classmethod
    @asynccontextmanager
    async def in_directory(cls, directory: Path, index: int, count: int) -> AsyncIterator["Siblings"]:
        """The siblings whose sockets are, or will be, in that directory."""
        others = {
            other: aiohttp.ClientSession(
                "http://localhost", connector=aiohttp.UnixConnector(str(socket_path(directory, other)))
            )
            for other in range(count)
            if other != index
        }
        try:
            yield cls(index, others)
        finally:
            await asyncio.gather(*(session.close() for session in others.values()))

    @property
    def leads(self) -> bool:
        """Whether this process carries out what concerns the whole cluster."""
        return self.index == 0

    async def states(self) -> Sequence[ProcessState]:
        """Of all that answer."""
        return await self._ask_all("GET", "/state", ProcessState)

    async def metrics(self) -> Sequence[str]:
        """Their own families, as Prometheus text."""
        return [raw.decode() for raw in await self._ask_all_raw("GET", "/metrics", None, LOCAL_TIMEOUT_S)]

    async def refresh(self) -> None:
        """Lets them hear the workers' newest state."""
        await self._ask_all_raw("POST", "/refresh", None, LOCAL_TIMEOUT_S)

    async def abort(self, names: Iterable[str]) -> set[str]:
        """Ends these requests wherever they are; the names that were found."""
        answers = await self._ask_all("POST", "/abort", Aborted, list(names), ABORT_TIMEOUT_S)
        return {name for answer in answers for name in answer.aborted}

    async def abort_rid(self, rid: str | None) -> list[str]:
        """SGLang's abort: a request, a choice of a batch, or everything; what was found."""
        answers = await self._ask_all("POST", "/abort_rid", Aborted, rid, ABORT_TIMEOUT_S)
        return [name for answer in answers for name in answer.aborted]

    async def forward(self, request: web.Request, body: bytes) -> web.Response:
        """Has process 0 answer. Raises UnavailableError if it cannot be reached."""
        headers = [(name, value) for name, value in request.headers.items() if name.title() not in _HOP_HEADERS]
        # The target as it was sent; the request's URL may have an authority of its own.
        parts = urlsplit(request.raw_path)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            async with self._others[0].request(
                request.method, target, data=body, headers=headers, timeout=_FORWARD_TIMEOUT
            ) as response:
                return web.Response(
                    status=response.status,
                    body=await response.read(),
                    content_type=response.content_type,
                    charset=response.charset,
                )
        except aiohttp.ClientError as error:
            raise UnavailableError("the router process that controls the cluster is being restarted") from error

    async def _ask_all(
        self, method: str, path: str, answer: type[AnswerT], body: object = None, timeout_s: float = LOCAL_TIMEOUT_S
    ) -> list[AnswerT]:
        return [msgspec.json.decode(raw, type=answer) for raw in await self._ask_all_raw(method, path, body, timeout_s)]

    async def _ask_all_raw(self, method: str, path: str, body: object, timeout_s: float) -> list[bytes]:
        answers = await asyncio.gather(*(self._ask(other, method, path, body, timeout_s) for other in self._others))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, other: int, method: str, path: str, body: object, timeout_s: float) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        data = msgspec.json.encode(body)
        try:
            async with self._others[other].request(method, path, data=data, timeout=timeout) as response:
                response.raise_for_status()
                return await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("router_process_silent", index=other, path=path, error=repr(error))
            return None
