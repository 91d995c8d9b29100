"""The supervisor of all handlers: nothing leaves the router but JSON, and a broken stream never looks finished."""

import asyncio

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from common.errors import (
    HandoffError,
    InternalError,
    InvalidRequestError,
    MoerelayError,
    RequestTimeoutError,
    WorkerLostError,
)
from router.errors import aiohttp_response, error_response
from router.keys import SETTINGS
from router.sse import EVENT_STREAM

#: What nginx logs for a client that left before its answer; it never travels.
CLIENT_LEFT = 499

log = structlog.get_logger()


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into an error body, or into the last event of the stream that it broke."""
    try:
        return await handler(request)
    except MoerelayError as error:
        return await _answer(request, error)
    except web.HTTPException as error:
        return aiohttp_response(error, request)
    except asyncio.CancelledError:
        log.info("client_left", path=request.path, status=CLIENT_LEFT)
        raise
    except ConnectionResetError:
        log.info("client_left", path=request.path, status=CLIENT_LEFT)
        return web.Response(status=CLIENT_LEFT)
    except Exception as error:  # a bug must not become a traceback on the wire
        log.exception("handler_failed", path=request.path)
        return await _answer(request, InternalError(f"internal error: {type(error).__name__}"))


@web.middleware
async def bound_sizes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses what is too large before a byte of the body is read.

    The parser bounds each header and their number, and whoever reads the body a chunked one.
    """
    limit = request.app[SETTINGS].max_header_bytes
    size = sum(len(name) + len(value) for name, value in request.raw_headers)
    if size > limit:
        raise InvalidRequestError(f"the headers have {size} bytes, more than --max-header-bytes {limit}")
    if (request.content_length or 0) > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size)
    return await handler(request)


async def _answer(request: web.Request, error: MoerelayError) -> web.StreamResponse:
    if isinstance(error, InternalError):
        log.error("request_failed", path=request.path, error=error.message)
    elif isinstance(error, HandoffError | WorkerLostError | RequestTimeoutError):
        log.warning("request_failed", path=request.path, kind=type(error).__name__, error=error.message)
    events = request.get(EVENT_STREAM)
    return await events.fail(error) if events and events.opened else error_response(error)
