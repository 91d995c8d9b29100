"""How an application listens on a port: limits of connections, and JSON where aiohttp itself would answer in text."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from common.errors import InternalError, InvalidRequestError, StartupError, UnavailableError
from common.process import host_port
from router.connections import MAX_CONNECTIONS, Tally, max_connections
from router.errors import RETRY_AFTER_S, aiohttp_response, error_body, error_response
from router.keys import SETTINGS, TLS

#: Handlers that a stopping router may not outlive: what it takes to send an error event to every client.
CLOSING_S = 2.0

#: Above the 60 s after which common load balancers close an idle connection, so that they close it, not we.
KEEPALIVE_S = 75.0

#: How much of the parser's complaint, which quotes the request, is repeated.
_MAX_COMPLAINT_CHARS = 200

#: What chooses a port, for complaints.
PORT_FLAGS, CONTROL_PORT_FLAGS = "--port or --host", "--admin-port or --admin-host"

log = structlog.get_logger()


class JsonRequestHandler(web.RequestHandler):
    """One connection. What happens before or outside an application's middlewares is answered in JSON too."""

    __slots__ = ()

    @property
    def is_idle(self) -> bool:
        """It waits for a request, or the rest of its headers."""
        return self._waiter is not None and not self._waiter.done()

    def refuse(self) -> None:
        """Answers that there are too many connections, whatever is asked, and closes this one."""
        if self.transport is not None:
            self.transport.write(_TOO_MANY)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Bytes that are no HTTP request (400), and bugs outside the middlewares (500). Closes the connection.

        The request is not logged: it may hold keys.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer is sent already")
        if status == HTTPStatus.BAD_REQUEST:
            log.info("not_http", reason=type(exc).__name__)
            response = error_response(InvalidRequestError(_complaint(exc, message)))
        else:
            log.error("connection_failed", error=repr(exc))
            response = error_response(InternalError("internal error"))
        response.force_close()
        return response


_TOO_MANY_BODY = error_body(UnavailableError("the router has as many connections as it can keep; try again later"))
_TOO_MANY = (
    f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: {RETRY_AFTER_S}"
    f"\r\nContent-Length: {len(_TOO_MANY_BODY)}\r\nConnection: close\r\n\r\n"
).encode() + _TOO_MANY_BODY


def _complaint(exc: BaseException | None, message: str | None) -> str:
    if isinstance(exc, LineTooLong):
        return "the request's target is longer than 8190 bytes, or a header longer than --max-header-bytes"
    text = exc.message if isinstance(exc, HttpProcessingError) else message
    return f"this is no HTTP/1.1 request: {' '.join((text or 'it cannot be parsed').split())[:_MAX_COMPLAINT_CHARS]}"


class JsonServer(web.Server):
    """Makes a JsonRequestHandler for each connection.

    Beyond `max_connections` a new one takes the place of the oldest that is idle, or is refused.
    """

    def __init__(self, made: web.Server, max_connections: int, **kwargs: Any) -> None:
        super().__init__(
            _without_text_answers(made),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
        )
        self._max_connections = max_connections
        self._tally = Tally(
            "too_many_connections", "raise the limit of open files (ulimit -n), or start more processes"
        )
        self._options = kwargs

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self._connections) > self._max_connections:
            self._make_room(handler)

    def _make_room(self, handler: web.RequestHandler) -> None:
        idle = (each for each in self._connections if isinstance(each, JsonRequestHandler) and each.is_idle)
        if (longest := next(idle, None)) is not None:
            self._tally.count(most=self._max_connections, closed="an idle one")
            longest.force_close()
        elif isinstance(handler, JsonRequestHandler):
            self._tally.count(most=self._max_connections, closed="the new one")
            handler.refuse()

    def __call__(self) -> JsonRequestHandler:
        return JsonRequestHandler(self, loop=self._loop, **self._options)


def _without_text_answers(made: web.Server) -> Any:
    """aiohttp raises some refusals before it runs the middlewares."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await made.request_handler(request)
        except web.HTTPException as error:
            return aiohttp_response(error, request)

    return handle


class JsonRunner(web.AppRunner):
    """Runs an application behind a JsonServer."""

    def __init__(self, app: web.Application, max_connections: int, options: dict[str, Any]) -> None:
        super().__init__(
            app,
            # Without it a client that left would go on occupying both workers.
            handler_cancellation=True,
            shutdown_timeout=CLOSING_S,
        )
        self._max_connections = max_connections
        self._options = options

    async def _make_server(self) -> web.Server:
        return JsonServer(await super()._make_server(), self._max_connections, **self._options)


def create_runner(app: web.Application) -> web.AppRunner:
    """How an application must be run, in the process and in tests."""
    return JsonRunner(
        app,
        app.get(MAX_CONNECTIONS) or max_connections(),
        {
            "access_log": None,
            "keepalive_timeout": KEEPALIVE_S,
            "max_field_size": app[SETTINGS].max_header_bytes,
            # It would be done on the event loop.
            "auto_decompress": False,
        },
    )


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, flags: str = PORT_FLAGS) -> AsyncIterator[str]:
    """Runs the application on that port (0: a free one), which `flags` choose, and gives its HOST:PORT.

    Raises:
        StartupError: the port cannot be bound.
    """
    runner = create_runner(app)
    await runner.setup()
    try:
        yield await _bind(runner, host, port, flags)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def listening_on(app: web.Application, sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
    """Runs the application on sockets that are bound already.

    Raises:
        StartupError: another program listens there, although the address could be bound.
    """
    runner = create_runner(app)
    await runner.setup()
    try:
        for each in sockets:
            host, port = each.getsockname()[:2]
            with _refusals(host, port, PORT_FLAGS):
                await web.SockSite(runner, each, ssl_context=_tls(app)).start()
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def listening_for_siblings(app: web.Application, path: Path) -> AsyncIterator[None]:
    """Runs the application on a unix socket, within the bounds of the port whose requests are handed on to it.

    Raises:
        StartupError: the path cannot be used.
    """
    runner = create_runner(app)
    await runner.setup()
    try:
        try:
            await web.UnixSite(runner, str(path)).start()
        except OSError as error:
            raise StartupError(f"cannot listen on {path}: {error}; is TMPDIR too long?") from error
        yield
    finally:
        await runner.cleanup()


async def _bind(runner: web.AppRunner, host: str, port: int, flags: str) -> str:
    with _refusals(host, port, flags):
        await web.TCPSite(runner, host, port, ssl_context=_tls(runner.app)).start()
    return host_port(host, runner.addresses[0][1])


def _tls(app: web.Application) -> ssl.SSLContext | None:
    """None: plain HTTP."""
    return app[TLS].context if TLS in app else None


@contextmanager
def _refusals(host: str, port: int, flags: str) -> Iterator[None]:
    """Turns what the system says against listening there into a StartupError."""
    try:
        yield
    except OSError as error:
        # asyncio's own text repeats the address in front of what the system said.
        reason = str(error.strerror).rpartition("): ")[2]
        raise StartupError(f"cannot listen on {host_port(host, port)}: {reason}; choose another {flags}") from error
