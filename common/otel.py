"""Spans of OpenTelemetry, and where they go. Imported only if something is traced."""

import asyncio
import json
import os
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Token
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import structlog
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.errors import ConfigError, MoerelayError
from common.tracing import CURRENT, NO_SPAN, TRACEPARENT, TRACESTATE, Attribute, Span, Tracing

#: For spans that are left when a process ends: a collector that answers takes milliseconds, and whoever stops the
#: process has waited for its requests already.
SHUTDOWN_TIMEOUT_S = 1.5

log = structlog.get_logger()

_PROPAGATOR = TraceContextTextMapPropagator()

#: Ids in OTLP's JSON are hex, unlike other bytes.
_ID_KEYS = frozenset({"traceId", "spanId", "parentSpanId"})


class RecordedSpan:
    """A span that is sent when it ends."""

    def __init__(self, tracer: Tracer, span: OtelSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self._token: Token[Span] | None = None

    @property
    def traceparent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)
        return carrier[TRACEPARENT]

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def child(self, name: str, **attributes: Attribute) -> "RecordedSpan":
        span = self._tracer.start_span(name, self._context, attributes=_dotted(attributes))
        return RecordedSpan(self._tracer, span)

    def past(self, name: str, took_s: float, **attributes: Attribute) -> None:
        now = time.time_ns()
        span = self._tracer.start_span(
            name, self._context, attributes=_dotted(attributes), start_time=_before(now, took_s)
        )
        span.end(now)

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_dotted(attributes))

    def __enter__(self) -> Self:
        self._token = CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None, "left before it was entered"
        CURRENT.reset(self._token)
        if error is not None:
            message = error.message if isinstance(error, MoerelayError) else type(error).__name__
            self._span.set_status(Status(StatusCode.ERROR, message))
            self._span.set_attribute("error.type", type(error).__name__)
        self._span.end()


class OtelTracing(Tracing):
    """Traces that one process begins or goes on with."""

    enabled = True

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def request(self, name: str, headers: Mapping[str, str], began_ago_s: float = 0.0) -> Span:
        carrier = {key: headers[key] for key in (TRACEPARENT, TRACESTATE) if key in headers}
        return self._start(name, carrier, began_ago_s)

    def served(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Span:
        carrier = {key: value for key, value in metadata if key == TRACEPARENT and isinstance(value, str)}
        return self._start(name, carrier) if carrier else NO_SPAN

    def received(self, name: str, traceparent: str, took_s: float) -> None:
        now, parent = time.time_ns(), _PROPAGATOR.extract({TRACEPARENT: traceparent})
        if not get_current_span(parent).get_span_context().is_valid:
            return
        span = self._tracer.start_span(name, parent, SpanKind.CONSUMER, start_time=_before(now, took_s))
        span.end(now)

    def _start(self, name: str, carrier: Mapping[str, str], began_ago_s: float = 0.0) -> Span:
        begin = _before(time.time_ns(), began_ago_s)
        span = self._tracer.start_span(name, _PROPAGATOR.extract(carrier), SpanKind.SERVER, start_time=begin)
        return RecordedSpan(self._tracer, span) if span.is_recording() else NO_SPAN


def _before(now_ns: int, seconds: float) -> int:
    return now_ns - round(seconds * 1e9)


def _dotted(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {name.replace("__", "."): value for name, value in attributes.items()}


@asynccontextmanager
async def traced(
    exporter: SpanExporter,
    sample_ratio: float,
    *,
    service: str,
    instance: str = "",
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
) -> AsyncIterator[OtelTracing]:
    """Exports in a thread of its own; what is left at the end, if that takes no longer than `shutdown_timeout_s`."""
    resource = Resource.create(
        {
            "service.namespace": "moerelay",
            "service.name": f"moerelay-{service}",
            "service.instance.id": instance or str(os.getpid()),
            "service.version": version("moerelay"),
            "process.pid": os.getpid(),
        }
    )
    # The interpreter's exit is too late for a process whose event loop has ended, and this one shuts down in time.
    provider = TracerProvider(ParentBased(TraceIdRatioBased(sample_ratio)), resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield OtelTracing(provider.get_tracer("moerelay"))
    finally:
        await _shut_down(provider, exporter, shutdown_timeout_s)


async def _shut_down(provider: TracerProvider, exporter: SpanExporter, timeout_s: float) -> None:
    """The provider itself waits for 30 s, and each export for 10 s."""
    # A daemon, so that a thread that waits for a collector keeps no process.
    ending = Thread(target=provider.shutdown, name="end of traces", daemon=True)
    ending.start()
    await asyncio.to_thread(ending.join, timeout_s)
    if ending.is_alive():
        log.warning("traces_not_sent", reason=f"the collector did not take them within {timeout_s:g} s")
        # Ends the call that is under way, and refuses others.
        await asyncio.to_thread(exporter.shutdown)
        await asyncio.to_thread(ending.join, timeout_s)


def exporter_to(endpoint: str) -> SpanExporter:
    """Raises ConfigError if the endpoint cannot be used."""
    parts = urlsplit(endpoint)
    if parts.scheme == "file":
        return FileExporter(Path(parts.path))
    if parts.scheme in ("http", "https") and parts.netloc:
        return OTLPSpanExporter(endpoint=endpoint, insecure=parts.scheme == "http")
    raise ConfigError(
        f"--otlp-traces-endpoint must be http://HOST:PORT, https://HOST:PORT or file:PATH, got {endpoint!r}"
    )


class FileExporter(SpanExporter):
    """Appends to a file, a batch per line, as OTLP's JSON. Several processes may share it: each line is one write.

    https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"--otlp-traces-endpoint file:{path} cannot be written: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        batch = _with_hex_ids(MessageToDict(encode_spans(spans)))
        self._file.write(json.dumps(batch, separators=(",", ":")).encode() + b"\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def _with_hex_ids(value: object) -> object:
    """The same with ids in hex; protobuf's JSON has them in base64."""
    if isinstance(value, list):
        return [_with_hex_ids(each) for each in value]
    if isinstance(value, dict):
        return {key: _hex(each) if key in _ID_KEYS else _with_hex_ids(each) for key, each in value.items()}
    return value


def _hex(text: str) -> str:
    return b64decode(text).hex()
