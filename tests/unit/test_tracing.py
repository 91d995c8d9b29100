"""Spans: nothing of them while tracing is off, and what a file holds of them, read as plain JSON, while it is on."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from structlog.testing import capture_logs

from common.errors import ConfigError, OverloadedError
from common.otel import traced
from common.tracing import NO_SPAN, call_metadata, current_span, open_tracing

#: https://www.w3.org/TR/trace-context/#examples-of-http-traceparent-headers
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-{flags}" for flags in ("01", "00"))


def spans_in(path: Path) -> dict[str, dict[str, object]]:
    """By name."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        span["name"]: span
        for line in lines
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }


def duration_s(span: dict[str, object]) -> float:
    return (int(str(span["endTimeUnixNano"])) - int(str(span["startTimeUnixNano"]))) / 1e9


def test_without_an_endpoint_nothing_is_imported_and_nothing_happens() -> None:
    program = """
import asyncio, sys
from common.tracing import NO_SPAN, call_metadata, current_span, open_tracing
async def main():
    async with open_tracing(None, 1.0, service="router") as tracing:
        with tracing.request("r", {}) as span, span.child("c") as child:
            child.past("p", 1.0)
            child.set(a=1)
            assert current_span() is NO_SPAN and call_metadata() is None and child.traceparent == ""
asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


async def test_a_tree_of_spans_ends_up_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with open_tracing(f"file:{path}", 1.0, service="router", instance="router-0") as tracing:
        with tracing.request("root", {}, began_ago_s=2.0) as root:
            root.set(gen_ai__request__id="r")
            with root.child("inner", index=3) as inner:
                assert current_span() is inner
                inner.past("past", 0.5)
        trace_id = root.trace_id
    spans = spans_in(path)
    assert {span["traceId"] for span in spans.values()} == {trace_id}
    assert "parentSpanId" not in spans["root"]
    assert spans["inner"]["parentSpanId"] == spans["root"]["spanId"]
    assert spans["past"]["parentSpanId"] == spans["inner"]["spanId"]
    assert duration_s(spans["past"]) == 0.5
    assert 2.0 <= duration_s(spans["root"]) < 60.0
    assert spans["root"]["attributes"] == [{"key": "gen_ai.request.id", "value": {"stringValue": "r"}}]
    assert spans["inner"]["attributes"] == [{"key": "index", "value": {"intValue": "3"}}]
    [line] = path.read_text().splitlines()
    resource = json.loads(line)["resourceSpans"][0]["resource"]["attributes"]
    assert {"key": "service.name", "value": {"stringValue": "moerelay-router"}} in resource
    assert {"key": "service.instance.id", "value": {"stringValue": "router-0"}} in resource


async def test_what_a_worker_does_hangs_below_what_called_it(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with (
        open_tracing(f"file:{path}", 1.0, service="router") as router,
        open_tracing(f"file:{path}", 0.0, service="decode") as worker,
    ):
        with router.request("root", {}):
            metadata = call_metadata()
            assert metadata is not None
        with worker.served("served", metadata) as served:
            worker.received("received", served.traceparent, 0.25)
    spans = spans_in(path)
    assert spans["served"]["parentSpanId"] == spans["root"]["spanId"]
    assert spans["received"]["parentSpanId"] == spans["served"]["spanId"]
    assert duration_s(spans["received"]) == 0.25


@pytest.mark.parametrize(
    ("ratio", "headers", "is_traced"),
    [
        (0.0, {}, False),
        (1.0, {}, True),
        (0.0, {"traceparent": SAMPLED}, True),
        (1.0, {"traceparent": UNSAMPLED}, False),
        (1.0, {"traceparent": "garbage"}, True),
    ],
)
async def test_who_decides_what_is_traced(
    tmp_path: Path, ratio: float, headers: dict[str, str], is_traced: bool
) -> None:
    path = tmp_path / "traces.jsonl"
    async with open_tracing(f"file:{path}", ratio, service="router") as tracing:
        with tracing.request("root", headers):
            assert (call_metadata() is not None) is is_traced
    spans = spans_in(path)
    assert ("root" in spans) is is_traced
    if headers.get("traceparent") == SAMPLED:
        assert (spans["root"]["traceId"], spans["root"]["parentSpanId"]) == (CLIENT_TRACE, CLIENT_SPAN)


@pytest.mark.parametrize("traceparent", ["", "garbage"])
async def test_a_worker_begins_no_trace_of_its_own(tmp_path: Path, traceparent: str) -> None:
    path = tmp_path / "traces.jsonl"
    async with open_tracing(f"file:{path}", 1.0, service="decode") as tracing:
        assert tracing.served("served", [("other", "x")]) is NO_SPAN
        tracing.received("received", traceparent, 1.0)
    assert path.read_text() == ""


async def test_what_failed_says_so(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with open_tracing(f"file:{path}", 1.0, service="router") as tracing:
        with pytest.raises(OverloadedError), tracing.request("root", {}):
            raise OverloadedError("too many")
        assert current_span() is NO_SPAN
    root = spans_in(path)["root"]
    assert root["status"] == {"code": "STATUS_CODE_ERROR", "message": "too many"}
    assert {"key": "error.type", "value": {"stringValue": "OverloadedError"}} in root["attributes"]  # type: ignore[operator]


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://", "file:/no/such/folder/traces"])
async def test_endpoints_that_cannot_be_used(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        async with open_tracing(endpoint, 1.0, service="router"):
            raise AssertionError("it opened")


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "common.otel", raising=False)
    with pytest.raises(ConfigError, match="moerelay\\[tracing\\]"):
        async with open_tracing("file:x", 1.0, service="router"):
            raise AssertionError("it opened")


class Collector(SpanExporter):
    """Takes spans only when it is `ready`, or was shut down."""

    def __init__(self) -> None:
        self.ready = Event()
        self.taken: list[str] = []
        self.num_ends = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.ready.wait()
        if self.num_ends:
            return SpanExportResult.FAILURE
        self.taken += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.num_ends += 1
        self.ready.set()


async def test_the_event_loop_goes_on_while_the_last_spans_are_sent() -> None:
    collector = Collector()
    async with asyncio.timeout(20):  # a loop that stands still would never let the collector take them
        async with traced(collector, 1.0, service="router", shutdown_timeout_s=20) as tracing:
            with tracing.request("root", {}):
                pass
            asyncio.get_running_loop().call_soon(collector.ready.set)
    assert collector.taken == ["root"]


async def test_a_collector_that_takes_nothing_is_given_up() -> None:
    collector = Collector()
    with capture_logs() as logs:
        async with traced(collector, 1.0, service="router", shutdown_timeout_s=0.01) as tracing:
            with tracing.request("root", {}):
                pass
    assert [line["event"] for line in logs] == ["traces_not_sent"]
    assert (collector.taken, collector.num_ends > 0) == ([], True)


async def test_a_collector_that_is_silent_is_given_up() -> None:
    """It accepts the connection and says nothing, until the process has gone on."""
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logs:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with open_tracing(endpoint, 1.0, service="router") as tracing:
            with tracing.request("root", {}):
                pass
    assert [line["event"] for line in logs] == ["traces_not_sent"]
