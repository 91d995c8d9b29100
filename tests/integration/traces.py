"""Reads traces out of a file of OTLP's JSON, and says how much of a request they explain."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class SpanRecord:
    """One span of one process; times in seconds since the epoch."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, object] = field(default_factory=dict)


def read_spans(path: Path) -> list[SpanRecord]:
    """All of them, in no order."""
    return [
        _record(span, _values(resource["resource"]["attributes"]))
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _record(span: dict[str, object], resource: dict[str, object]) -> SpanRecord:
    def text(key: str) -> str:
        return str(span.get(key, ""))

    return SpanRecord(
        name=text("name"),
        service=str(resource["service.name"]),
        trace_id=text("traceId"),
        span_id=text("spanId"),
        parent_id=text("parentSpanId"),
        start=int(text("startTimeUnixNano")) / 1e9,
        end=int(text("endTimeUnixNano")) / 1e9,
        attributes=_values(span.get("attributes", [])),
    )


def _values(pairs: object) -> dict[str, object]:
    assert isinstance(pairs, list)
    return {pair["key"]: next(iter(pair["value"].values())) for pair in pairs}


@dataclass(frozen=True)
class Trace:
    """The spans of one request."""

    spans: tuple[SpanRecord, ...]

    @property
    def root(self) -> SpanRecord:
        """The only one without a parent; every other's parent is among the spans."""
        ids = {span.span_id for span in self.spans}
        [root] = [span for span in self.spans if not span.parent_id]
        assert all(span.parent_id in ids for span in self.spans if span is not root), "a span without its parent"
        return root

    def edges(self) -> set[tuple[str, str, str]]:
        """(name of the parent, name, service) of every span."""
        names = {span.span_id: span.name for span in self.spans}
        return {(names.get(span.parent_id, ""), span.name, span.service) for span in self.spans}

    def unexplained(self, without: Iterable[str] = ()) -> float:
        """The share of the root's time in which no stage is under way: no span that has no spans of its own.

        `without`: names of spans that are not counted.
        """
        root, parents, ignored = self.root, {span.parent_id for span in self.spans}, set(without)
        stages = [s for s in self.spans if s.span_id not in parents and s.name not in ignored]
        explained, reached = 0.0, root.start
        for start, end in sorted((max(s.start, root.start), min(s.end, root.end)) for s in stages):
            explained += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return 1 - explained / (root.end - root.start)


def traces_in(path: Path) -> list[Trace]:
    """By request, in the order in which they began."""
    by_id: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in read_spans(path):
        by_id[span.trace_id].append(span)
    return sorted((Trace(tuple(spans)) for spans in by_id.values()), key=lambda trace: trace.root.start)
