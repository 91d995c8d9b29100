"""Traces of the requests that a worker serves: spans that the router's calls begin, and the engine's stages in them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc
import structlog

from common.engine.request import RequestId
from common.tracing import NO_SPAN, TRACING_OFF, Span, Tracing

log = structlog.get_logger()


class Call(Protocol):
    """What a span needs to know of a gRPC call."""

    def invocation_metadata(self) -> grpc.aio.Metadata | None: ...


class RequestSpans:
    """The spans of live requests, by id; none of them if the worker traces nothing."""

    def __init__(self, tracing: Tracing = TRACING_OFF) -> None:
        self.tracing = tracing
        self._names: dict[RequestId, str] = {}
        self._spans: dict[RequestId, Span] = {}

    @contextmanager
    def served(self, name: str, request_id: RequestId, call: Call) -> Iterator[None]:
        """Around the call that serves a request: its span is the current one, and log lines name its trace."""
        span = self.tracing.served(name, call.invocation_metadata() or ()) if self.tracing.enabled else NO_SPAN
        if not span.trace_id:
            with _logged(name):
                yield
            return
        with span, structlog.contextvars.bound_contextvars(trace_id=span.trace_id), _logged(name):
            self._names[request_id], self._spans[request_id] = name, span
            try:
                yield
            finally:
                del self._spans[request_id], self._names[request_id]

    def past(self, request_id: RequestId, stage: str, took_s: float) -> None:
        """A stage of a request, if that is traced, ends now. May be called on any thread."""
        span, name = self._spans.get(request_id), self._names.get(request_id)
        if span is not None and name is not None:
            span.past(f"{name}.{stage}", took_s)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Two lines, at level debug, whose context names the request."""
    log.debug("request_taken", call=name)
    began = time.monotonic()
    outcome = "cancelled"
    try:
        yield
        outcome = "finished"
    except Exception as error:
        outcome = type(error).__name__
        raise
    finally:
        log.debug("request_ended", call=name, outcome=outcome, took_s=round(time.monotonic() - began, 6))
