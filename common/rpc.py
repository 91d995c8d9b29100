"""What every gRPC server and client of moerelay shares: limits, keepalive, and errors that keep their class."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import structlog

from common.errors import (
    AuthenticationError,
    ConflictError,
    DuplicateRequestError,
    HandoffCorruptError,
    HandoffError,
    HandoffRefusedError,
    HandoffTimeoutError,
    InternalError,
    InvalidRequestError,
    MoerelayError,
    NotFoundError,
    NotTakenError,
    OverloadedError,
    PausedError,
    PayloadTooLargeError,
    RequestTimeoutError,
    RoutingMissingError,
    UnavailableError,
    WorkerLostError,
)

#: Version of the gRPC services, compared when workers pair; the handoff has its own, compared in its handshake.
PROTOCOL_VERSION = 6

log = structlog.get_logger()

#: gRPC status, and the `moerelay-error` trailer that lets the caller rebuild the exact class.
GRPC_TABLE: dict[type[MoerelayError], tuple[grpc.StatusCode, str]] = {
    InvalidRequestError: (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request"),
    AuthenticationError: (grpc.StatusCode.UNAUTHENTICATED, "authentication"),
    NotFoundError: (grpc.StatusCode.NOT_FOUND, "not_found"),
    RequestTimeoutError: (grpc.StatusCode.DEADLINE_EXCEEDED, "request_timeout"),
    DuplicateRequestError: (grpc.StatusCode.ALREADY_EXISTS, "duplicate_request"),
    ConflictError: (grpc.StatusCode.FAILED_PRECONDITION, "conflict"),
    PayloadTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "payload_too_large"),
    OverloadedError: (grpc.StatusCode.RESOURCE_EXHAUSTED, "overloaded"),
    UnavailableError: (grpc.StatusCode.UNAVAILABLE, "unavailable"),
    NotTakenError: (grpc.StatusCode.UNAVAILABLE, "not_taken"),
    PausedError: (grpc.StatusCode.UNAVAILABLE, "paused"),
    WorkerLostError: (grpc.StatusCode.UNAVAILABLE, "worker_lost"),
    HandoffError: (grpc.StatusCode.ABORTED, "handoff"),
    HandoffRefusedError: (grpc.StatusCode.FAILED_PRECONDITION, "handoff_refused"),
    HandoffCorruptError: (grpc.StatusCode.DATA_LOSS, "handoff_corrupt"),
    HandoffTimeoutError: (grpc.StatusCode.DEADLINE_EXCEEDED, "handoff_timeout"),
    InternalError: (grpc.StatusCode.INTERNAL, "internal"),
    RoutingMissingError: (grpc.StatusCode.INTERNAL, "routing_missing"),
}

ERROR_TRAILER = "moerelay-error"
PARAM_TRAILER = "moerelay-param"
#: Whole seconds, with an OverloadedError that knows them.
RETRY_AFTER_TRAILER = "moerelay-retry-after"

#: Of a message on the wire. A byte may take three there, and gRPC may drop a call whose trailers exceed 8 KiB.
_MAX_MESSAGE_BYTES = 2400

_CLASS_BY_TRAILER = {kind: cls for cls, (_, kind) in GRPC_TABLE.items()}

#: What a bare gRPC status means when the peer sent no trailer, i.e. when gRPC itself failed.
_CLASS_BY_STATUS: dict[grpc.StatusCode, type[MoerelayError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerLostError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PayloadTooLargeError,
    grpc.StatusCode.DEADLINE_EXCEEDED: WorkerLostError,
    # gRPC drops calls that its server had no time to accept, and those of a server that stops.
    grpc.StatusCode.CANCELLED: UnavailableError,
}


def from_grpc(code: grpc.StatusCode, details: str, trailers: dict[str, str]) -> MoerelayError:
    """Rebuilds the error that a worker raised; a status that gRPC made itself becomes its nearest class."""
    if code is grpc.StatusCode.CANCELLED:
        details = "the worker dropped the call before it was accepted; try again"
    cls = _CLASS_BY_TRAILER.get(trailers.get(ERROR_TRAILER, "")) or _CLASS_BY_STATUS.get(code, InternalError)
    if cls is WorkerLostError:
        return WorkerLostError(details, param=trailers.get(PARAM_TRAILER), unreachable=ERROR_TRAILER not in trailers)
    if cls is OverloadedError:
        seconds = trailers.get(RETRY_AFTER_TRAILER, "")
        retry_after_s = int(seconds) if seconds.isdecimal() else None
        return OverloadedError(details, param=trailers.get(PARAM_TRAILER), retry_after_s=retry_after_s)
    return cls(details, param=trailers.get(PARAM_TRAILER))


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of servers and channels; gRPC's own limit of 4 MiB would refuse a long prompt's token ids or rows."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A peer that vanished without closing its socket is noticed after about interval + timeout.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # The server must tolerate the client's ping interval, or it answers with GOAWAY "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Prompts go to the worker and to nobody else, whatever http_proxy says.
        ("grpc.enable_http_proxy", 0),
        # Workers that come back are tried again at once, not after gRPC's default backoff of up to 2 minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Also at another address, if their name has one: gRPC would ask for it every 30 seconds at most.
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ]


@contextmanager
def grpc_errors() -> Iterator[None]:
    """Client side: turns grpc.aio errors into the MoerelayError that the server raised."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        trailers = {str(key): _text(value) for key, value in error.trailing_metadata() or ()}
        raise from_grpc(error.code(), error.details() or error.code().name, trailers) from error
    except grpc.aio.UsageError as error:  # the channel was closed: its worker is not listed any more
        raise WorkerLostError(str(error), unreachable=True) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Server side: a MoerelayError ends the call with its status and trailers; anything else is INTERNAL and logged."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(details)
        if handler is None:
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _guard(handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream is not None and handler.request_deserializer is not None:
            return grpc.unary_stream_rpc_method_handler(
                _guard(handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _guard(behavior: Any) -> Any:
    """Wraps a coroutine handler; streaming ones write to the context too, so that cancelling unwinds them at once."""

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except MoerelayError as error:
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the supervisor of this process's RPC handlers
            log.exception("rpc_failed")
            await _abort(context, InternalError(f"internal error: {type(error).__name__}"))

    return guarded


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: MoerelayError) -> NoReturn:
    cls = next(c for c in type(error).__mro__ if c in GRPC_TABLE)
    code, kind = GRPC_TABLE[cls]
    trailers = [(ERROR_TRAILER, kind)]
    if error.param:  # gRPC takes ASCII only
        trailers.append((PARAM_TRAILER, error.param.encode("ascii", "backslashreplace").decode()))
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        trailers.append((RETRY_AFTER_TRAILER, str(error.retry_after_s)))
    await context.abort(code, _shortened(error.message), tuple(trailers))


def _shortened(message: str) -> str:
    encoded = message.encode("utf-8", "backslashreplace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:_MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + "…"
