"""What one router process asks the others: over HTTP on unix sockets in a directory that only they can enter."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp import web
from structlog import get_logger

from common.errors import MoerelayError, UnavailableError
from router.errors import error_in
from router.processes.gauges import Readings

#: Of an answer that needs no worker.
LOCAL_TIMEOUT_S = 3.0
#: An abort tries again until its workers have heard of the request.
ABORT_TIMEOUT_S = 15.0
#: What takes long there (pausing, loading weights) takes as long as it takes.
_FORWARD_TIMEOUT = aiohttp.ClientTimeout(total=None)

#: Headers of one connection, not of the message; and its coding, because bodies are decoded where they are read.
_HOP_HEADERS = frozenset(
    {"Connection", "Content-Encoding", "Content-Length", "Expect", "Host", "Keep-Alive", "Te", "Trailer"}
    | {"Transfer-Encoding", "Upgrade"}
)

#: A process that has not bound its unix socket yet, or has died.
_NOBODY_LISTENS = (FileNotFoundError, ConnectionRefusedError)

AnswerT = TypeVar("AnswerT")
OtherT = TypeVar("OtherT")

log = get_logger()


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One router process. `complaint`: why it is not ready; None if it is."""

    in_flight: int
    draining: bool
    complaint: str | None


@dataclass(frozen=True, slots=True)
class Aborted:
    """Ids that were live on the process and have been told to stop.

    `failed`: those whose workers could not be told, each with the type and the message of the error.
    """

    aborted: list[str]
    failed: dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answers(Generic[AnswerT]):
    """What the other processes have said.

    `refused`: errors of those that answered with one. `silent`: those that exist and have not answered in time.
    """

    said: list[AnswerT]
    refused: list[MoerelayError]
    silent: list[int]

    def require_all(self) -> None:
        """Raises UnavailableError if a process is missing that may have had something to say, or its own error."""
        if self.refused:
            raise self.refused[0]
        if self.silent:
            names = ", ".join(map(str, self.silent))
            raise UnavailableError(f"of this router's processes, {names} did not answer in time; try again")

    def map(self, function: Callable[[AnswerT], OtherT]) -> "Answers[OtherT]":
        """Each answer as `function` has it."""
        return Answers([function(each) for each in self.said], self.refused, self.silent)


class _Missing(Enum):
    """Why there is no answer: the process is not there, with all that it had, or does not answer in time."""

    GONE = auto()
    SILENT = auto()


def socket_path(directory: Path, index: int) -> Path:
    """Where the process of that index listens for its siblings."""
    return directory / f"{index}.sock"


class Siblings:
    """The other processes of this router; there may be none. Process 0 carries out what concerns the whole cluster.

    A process that is being restarted does not exist; it is left out of whatever is asked of all.
    """

    def __init__(
        self,
        index: int,
        others: Mapping[int, aiohttp.ClientSession],
        *,
        local_timeout_s: float = LOCAL_TIMEOUT_S,
        abort_timeout_s: float = ABORT_TIMEOUT_S,
    ) -> None:
        self.index = index
        self._others = others
        self._local_timeout_s = local_timeout_s
        self._abort_timeout_s = abort_timeout_s

    @classmethod
    @asynccontextmanager
    async def in_directory(
        cls, directory: Path, index: int, count: int, **timeouts_s: float
    ) -> AsyncIterator["Siblings"]:
        """The siblings whose sockets are, or will be, in that directory."""
        others = {
            other: aiohttp.ClientSession(
                "http://localhost", connector=aiohttp.UnixConnector(str(socket_path(directory, other)))
            )
            for other in range(count)
            if other != index
        }
        try:
            yield cls(index, others, **timeouts_s)
        finally:
            await asyncio.gather(*(session.close() for session in others.values()))

    @property
    def leads(self) -> bool:
        """Whether this process carries out what concerns the whole cluster."""
        return self.index == 0

    async def states(self) -> Answers[ProcessState]:
        answers = await self._ask_all("GET", "/state", None, self._local_timeout_s)
        return answers.map(partial(msgspec.json.decode, type=ProcessState))

    async def gauges(self) -> Answers[Readings]:
        answers = await self._ask_all("GET", "/gauges", None, self._local_timeout_s)
        return answers.map(partial(msgspec.json.decode, type=Readings))

    async def refresh(self) -> None:
        """Lets them hear the workers' newest state."""
        await self._ask_all("POST", "/refresh", None, self._local_timeout_s)

    async def abort(self, names: Iterable[str]) -> Answers[Aborted]:
        """Ends these requests wherever they are."""
        return (await self._ask_all("POST", "/abort", list(names), self._abort_timeout_s)).map(_aborted)

    async def abort_rid(self, rid: str | None) -> Answers[Aborted]:
        """SGLang's abort: a request, a choice of a batch, or everything."""
        return (await self._ask_all("POST", "/abort_rid", rid, self._abort_timeout_s)).map(_aborted)

    async def forward(self, request: web.Request, body: bytes) -> web.Response:
        """Has process 0 answer. Raises UnavailableError if it cannot be reached."""
        # The target as it was sent; the request's URL may have an authority of its own.
        parts = urlsplit(request.raw_path)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            async with self._others[0].request(
                request.method, target, data=body, headers=_end_to_end(request.headers), timeout=_FORWARD_TIMEOUT
            ) as response:
                return web.Response(
                    status=response.status, body=await response.read(), headers=_end_to_end(response.headers)
                )
        except aiohttp.ClientError as error:
            raise UnavailableError("the router process that controls the cluster is being restarted") from error

    async def _ask_all(self, method: str, path: str, body: object, timeout_s: float) -> Answers[bytes]:
        asked = [self._ask(other, method, path, body, timeout_s) for other in self._others]
        answers = dict(zip(self._others, await asyncio.gather(*asked), strict=True))
        return Answers(
            [answer for answer in answers.values() if isinstance(answer, bytes)],
            [answer for answer in answers.values() if isinstance(answer, MoerelayError)],
            [index for index, answer in answers.items() if answer is _Missing.SILENT],
        )

    async def _ask(
        self, other: int, method: str, path: str, body: object, timeout_s: float
    ) -> bytes | MoerelayError | _Missing:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        data = msgspec.json.encode(body)
        try:
            async with self._others[other].request(method, path, data=data, timeout=timeout) as response:
                answer = await response.read()
                if response.status < HTTPStatus.BAD_REQUEST:
                    return answer
                refusal = error_in(answer, f"process {other} of this router")
                log.warning("router_process_refused", index=other, path=path, error=refusal.message)
                return refusal
        except (aiohttp.ClientError, TimeoutError) as error:
            gone = isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, _NOBODY_LISTENS)
            event = "router_process_gone" if gone else "router_process_silent"
            log.warning(event, index=other, path=path, error=repr(error))
            return _Missing.GONE if gone else _Missing.SILENT


def _aborted(answer: bytes) -> Aborted:
    return msgspec.json.decode(answer, type=Aborted)


def _end_to_end(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Those that belong to the message, and not to the connection that it came on."""
    return [(name, value) for name, value in headers.items() if name.title() not in _HOP_HEADERS]
