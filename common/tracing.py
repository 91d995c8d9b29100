"""Traces of requests across router, prefill and decode workers, as trees of spans.

Off unless told otherwise, and then nothing of OpenTelemetry is imported: spans are `NO_SPAN`, which does nothing. A
worker traces the requests that a router traces, which is told by W3C's `traceparent` in the call's metadata, and in the
last message of a handoff (https://www.w3.org/TR/trace-context/).
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self

import grpc

from common.errors import ConfigError

#: Name of the header, and of the entry in the metadata of calls.
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

Attribute = str | int | float | bool


class Span(Protocol):
    """One stage of one request; as a context manager it is the current span inside and ends with it.

    An exception that leaves the context marks it as failed.
    """

    @property
    def traceparent(self) -> str:
        """Names this span to another process; empty if nothing is traced."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty if nothing is traced."""
        ...

    def child(self, name: str, **attributes: Attribute) -> "Span":
        """A stage of this one that begins now."""
        ...

    def past(self, name: str, took_s: float, **attributes: Attribute) -> None:
        """A stage of this one that ends now, after so many seconds. May be called on any thread."""
        ...

    def set(self, **attributes: Attribute) -> None:
        """Says more of this stage; two underscores in a name stand for a dot."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NoSpan:
    """Of a request that is not traced, and all of its stages."""

    traceparent = ""
    trace_id = ""

    def child(self, name: str, **attributes: Attribute) -> "NoSpan":
        return self

    def past(self, name: str, took_s: float, **attributes: Attribute) -> None:
        pass

    def set(self, **attributes: Attribute) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NO_SPAN = NoSpan()

#: The innermost span whose context is entered; tasks inherit it from whoever started them.
CURRENT: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """Of the request that this task works for; `NO_SPAN` if that is not traced."""
    return CURRENT.get()


def call_metadata() -> grpc.aio.Metadata | None:
    """What a gRPC call takes along so that its spans become children of the current one; None: nothing."""
    traceparent = CURRENT.get().traceparent
    return grpc.aio.Metadata((TRACEPARENT, traceparent)) if traceparent else None


class Tracing:
    """Where the traces of a process begin; this one is off."""

    #: Whether there is anything to find in the metadata of calls.
    enabled = False

    def request(self, name: str, headers: Mapping[str, str], began_ago_s: float = 0.0) -> Span:
        """The first span of a request that a client sends. `headers` may name the client's own span.

        Sampling is decided here, unless the client has decided.
        """
        return NO_SPAN

    def served(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span:
        """The first span of a call that a router makes, or `NO_SPAN` if it does not trace the request."""
        return NO_SPAN

    def received(self, name: str, traceparent: str, took_s: float) -> None:
        """What another process's span has caused here; ends now, after so many seconds. Nothing without its name."""


TRACING_OFF = Tracing()


@asynccontextmanager
async def open_tracing(
    endpoint: str | None, sample_ratio: float, *, service: str, instance: str = ""
) -> AsyncIterator[Tracing]:
    """Sends spans to `endpoint` while it is entered; what is left goes out at its end, or is lost soon. None: off.

    Args:
        endpoint: http://HOST:PORT or https://HOST:PORT of an OTLP collector (gRPC), or file:PATH.
        sample_ratio: share of the requests that are traced, of those whose clients do not say.
        service: name of this kind of process.
        instance: name of this process among those.

    Raises:
        ConfigError: the extra `tracing` is not installed, or the endpoint cannot be used.
    """
    if endpoint is None:
        yield TRACING_OFF
        return
    try:
        from common.otel import exporter_to, traced
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs the extra tracing ({error.name} is missing): pip install 'moerelay[tracing]'"
        ) from error
    async with traced(exporter_to(endpoint), sample_ratio, service=service, instance=instance) as tracing:
        yield tracing
