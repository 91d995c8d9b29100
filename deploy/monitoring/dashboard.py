"""The Grafana dashboard: rows of panels, each a question and the queries that answer it."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.monitoring.alerts import per_worker, quantile, worker_quantile

#: Of Grafana's grid, which has 24 columns.
_WIDTH, _HEIGHT = 8, 7


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph."""

    title: str
    #: Grafana's name: s, bytes, Bps, percentunit, short, reqps.
    unit: str
    queries: tuple[Query, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A row of the dashboard."""

    title: str
    panels: tuple[Panel, ...]


def _quantiles(histogram: str, *, of_workers: bool = False) -> tuple[Query, ...]:
    make, who = (worker_quantile, " {{role}}") if of_workers else (quantile, "")
    return tuple(Query(make(share, histogram), f"p{round(share * 100)}{who}") for share in (0.5, 0.95, 0.99))


def _summed(metric: str, *labels: str) -> str:
    """Rate of a worker's counter, over all workers."""
    rates = per_worker(f"rate({metric}[$__rate_interval])", *labels)
    return f"sum by ({', '.join(('role', *labels))}) ({rates})"


def _rate(metric: str, *labels: str) -> str:
    """Rate of a router's counter, over all routers."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({metric}[$__rate_interval]))"


_HITS = _summed("moerelay_prefix_cache_hit_tokens_total")
_LOOKUPS = _summed("moerelay_prefix_cache_queries_tokens_total")

SECTIONS = (
    Section(
        "What clients see",
        (
            Panel(
                "Requests",
                "reqps",
                (Query(_rate("moerelay_router_requests_total", "outcome"), "{{outcome}}"),),
            ),
            Panel("Errors", "reqps", (Query(_rate("moerelay_router_errors_total", "type"), "{{type}}"),)),
            Panel("In flight", "short", (Query("sum(moerelay_router_in_flight)", "requests"),)),
            Panel("Time to first token", "s", _quantiles("moerelay_time_to_first_token_seconds")),
            Panel("Inter-token latency", "s", _quantiles("moerelay_inter_token_latency_seconds")),
            Panel("End to end latency", "s", _quantiles("moerelay_e2e_request_latency_seconds")),
            Panel(
                "Tokens",
                "short",
                (
                    Query(_rate("moerelay_prompt_tokens_total"), "prompt"),
                    Query(_rate("moerelay_generation_tokens_total"), "generated"),
                ),
            ),
            Panel(
                "How choices ended",
                "short",
                (Query(_rate("moerelay_request_success_total", "finished_reason"), "{{finished_reason}}"),),
            ),
            Panel(
                "Goodput",
                "reqps",
                (
                    Query(_summed("moerelay_slo_met_total", "objective"), "{{objective}} met"),
                    Query(_summed("moerelay_slo_missed_total", "objective"), "{{objective}} missed"),
                ),
                "Only with --slo-ttft or --slo-itl.",
            ),
        ),
    ),
    Section(
        "Stages of a request",
        (
            Panel("Queue", "s", _quantiles("moerelay_request_queue_time_seconds", of_workers=True)),
            Panel("Prefill", "s", _quantiles("moerelay_request_prefill_time_seconds", of_workers=True)),
            Panel(
                "Handoff",
                "s",
                _quantiles("moerelay_request_handoff_time_seconds", of_workers=True),
                "From a seat on the decode worker to the prompt's arrival; the prefill is in it.",
            ),
            Panel("Sending of a handoff", "s", _quantiles("moerelay_handoff_send_seconds", of_workers=True)),
            Panel("Decode", "s", _quantiles("moerelay_request_decode_time_seconds", of_workers=True)),
            Panel(
                "Router",
                "s",
                (Query(quantile(0.95, "moerelay_router_stage_seconds", "stage"), "p95 {{stage}}"),),
                "Planning and placing of a request; stitching, encoding and sending of one event in sixteen.",
            ),
        ),
    ),
    Section(
        "Rows and bytes",
        (
            Panel(
                "Handoff bytes",
                "Bps",
                (Query(_summed("moerelay_handoff_bytes_total"), "{{role}}"),),
                "Sent by prefill workers, received by decode workers.",
            ),
            Panel(
                "Routing rows",
                "short",
                (
                    Query(_summed("moerelay_routing_rows_captured_total"), "captured {{role}}"),
                    Query(_summed("moerelay_routing_rows_shipped_total"), "shipped"),
                    Query(_summed("moerelay_routing_rows_received_total"), "received"),
                    Query(_rate("moerelay_routing_rows_sent_total"), "to clients"),
                ),
            ),
            Panel(
                "To clients",
                "Bps",
                (Query(_rate("moerelay_router_sent_bytes_total"), "bytes"),),
            ),
        ),
    ),
    Section(
        "Workers",
        (
            Panel("Usable", "short", (Query("min by (role) (moerelay_workers_usable)", "{{role}}"),)),
            Panel(
                "Sequences",
                "short",
                (
                    Query(per_worker("moerelay_requests_running"), "{{worker}} running"),
                    Query(per_worker("moerelay_requests_waiting"), "{{worker}} waiting"),
                ),
            ),
            Panel("KV cache", "percentunit", (Query(per_worker("moerelay_kv_cache_usage_perc"), "{{worker}}"),)),
            Panel("Prefix cache hits", "percentunit", (Query(f"{_HITS} / {_LOOKUPS}", "{{role}}"),)),
            Panel("Preemptions", "short", (Query(_summed("moerelay_preemptions_total"), "{{role}}"),)),
            Panel(
                "Refused requests", "reqps", (Query(_summed("moerelay_requests_refused_total", "cause"), "{{cause}}"),)
            ),
            Panel("Tokens per step", "short", _quantiles("moerelay_iteration_tokens_total", of_workers=True)),
            Panel(
                "Failures",
                "short",
                (
                    Query(_summed("moerelay_handoff_failures_total"), "handoffs {{role}}"),
                    Query(_summed("moerelay_engine_step_failures_total"), "steps {{role}}"),
                    Query(_summed("moerelay_self_check_differences_total", "kind"), "self-check {{kind}}"),
                ),
            ),
            Panel(
                "Prediction of steps",
                "percentunit",
                (Query(per_worker("moerelay_engine_step_prediction_error"), "{{worker}}"),),
            ),
        ),
    ),
    Section(
        "Processes",
        (
            Panel(
                "Cpu",
                "short",
                (
                    Query(
                        'sum by (instance) (rate(process_cpu_seconds_total{worker=""}[$__rate_interval]))',
                        "router {{instance}}",
                    ),
                    Query(per_worker('rate(process_cpu_seconds_total{worker!=""}[$__rate_interval])'), "{{worker}}"),
                ),
                "Cores that are busy.",
            ),
            Panel(
                "Memory",
                "bytes",
                (
                    Query('sum by (instance) (process_resident_memory_bytes{worker=""})', "router {{instance}}"),
                    Query(per_worker('process_resident_memory_bytes{worker!=""}'), "{{worker}}"),
                ),
            ),
            Panel("Open files", "short", (Query("process_open_fds", "{{instance}} {{worker}}"),)),
        ),
    ),
)


def dashboard() -> dict[str, object]:
    """Grafana's JSON model."""
    return {
        "uid": "moerelay",
        "title": "moerelay",
        "tags": ["moerelay"],
        "schemaVersion": 38,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": list(_placed()),
    }


def _placed() -> Iterator[dict[str, object]]:
    """Rows and panels, numbered, from top to bottom."""
    number, top = 0, 0
    for section in SECTIONS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": section.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
            "panels": [],
        }
        top += 1
        for at, panel in enumerate(section.panels):
            number += 1
            left, down = at % 3 * _WIDTH, at // 3 * _HEIGHT
            yield _graph(panel, number) | {"gridPos": {"x": left, "y": top + down, "w": _WIDTH, "h": _HEIGHT}}
        top += -(-len(section.panels) // 3) * _HEIGHT


def _graph(panel: Panel, number: int) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query.expr, "legendFormat": query.legend, "datasource": source}
            for at, query in enumerate(panel.queries)
        ],
    }
