"""Alert rules fire when they should and only then, as promtool sees it; dashboards and runbooks know what exists."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.dashboard import SECTIONS
from deploy.monitoring.generate import RULES, files

ROOT = Path(__file__).parents[3]
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="NO ALERT RULE IS TESTED: promtool is missing; on Debian: scripts/install_promtool.sh"
)

D, P = '{role="decode",worker="decode-0"}', '{role="prefill",worker="prefill-0"}'


@dataclass(frozen=True)
class Situation:
    """Series that make an alert fire within 25 minutes, and some that do not, as promtool has them."""

    firing: dict[str, str]
    quiet: dict[str, str]


def both(series: str, firing: str, quiet: str) -> Situation:
    return Situation({series: firing}, {series: quiet})


def latencies(name: str, bound: str, beyond: str, labels: str = "") -> Situation:
    """60 observations per minute, all of them between `bound` and `beyond`; or all below `bound`."""
    many, none = "0+60x30", "0x30"
    buckets = [f'{name}_bucket{{le="{le}"{labels}}}' for le in (bound, beyond, "+Inf")]
    late, early = (none, many, many), (many, many, many)
    return Situation(dict(zip(buckets, late, strict=True)), dict(zip(buckets, early, strict=True)))


SITUATIONS = {
    "MoerelayRouterDown": both('up{job="moerelay-router",instance="r:8000"}', "1x5 0x25", "1x30"),
    "MoerelayNoWorkers": both('moerelay_workers_usable{role="prefill",instance="r:8000"}', "1x5 0x25", "1x30"),
    "MoerelayWorkerDown": Situation(
        {f"moerelay_worker_up{D}": "1x5 0x25", 'moerelay_worker_up{role="decode",worker="decode-1"}': "1x30"},
        {f"moerelay_worker_up{D}": "1x24 0 1x5"},
    ),
    "MoerelayWorkerRefused": both(f"moerelay_worker_refused{D}", "0x5 1x25", "0x30"),
    "MoerelayDiscoveryFailing": both('moerelay_discovery_failing{source="dns://decode:7000"}', "0x5 1x25", "0 1 0x28"),
    "MoerelayCertificateEnds": both(
        'moerelay_certificate_seconds_left{certificate="cluster",role="decode",worker="decode-0"}',
        "2592060-60x30",
        "2595600-60x30",
    ),
    "MoerelayErrors": Situation(
        {
            'moerelay_router_errors_total{type="HandoffTimeoutError"}': "0+3x30",
            'moerelay_router_requests_total{endpoint="generate",outcome="finished"}': "0+97x30",
            'moerelay_router_requests_total{endpoint="generate",outcome="error"}': "0+3x30",
        },
        {
            'moerelay_router_errors_total{type="BadRequestError"}': "0+50x30",
            'moerelay_router_requests_total{endpoint="generate",outcome="finished"}': "0+50x30",
            'moerelay_router_requests_total{endpoint="generate",outcome="error"}': "0+50x30",
        },
    ),
    "MoerelayHandoffFailures": both(f"moerelay_handoff_failures_total{D}", "0x15 0+1x15", "0x20 2x10"),
    "MoerelayHandoffMalformed": both(f"moerelay_handoff_malformed_total{D}", "0x20 1x10", "1x30"),
    "MoerelayEngineStepFailures": both(f"moerelay_engine_step_failures_total{D}", "0x20 1x10", "7x30"),
    "MoerelaySelfCheckDifference": both(
        'moerelay_self_check_differences_total{role="decode",worker="decode-0",kind="rows"}', "0x20 1x10", "0x30"
    ),
    "MoerelayQueueTime": latencies(
        "moerelay_request_queue_time_seconds", "5.0", "10.0", ',role="prefill",worker="prefill-0"'
    ),
    "MoerelayTimeToFirstToken": latencies("moerelay_time_to_first_token_seconds", "10.0", "20.0"),
    "MoerelayInterTokenLatency": latencies("moerelay_inter_token_latency_seconds", "0.5", "0.75"),
    "MoerelayObjectivesMissed": Situation(
        {
            'moerelay_slo_met_total{role="decode",worker="decode-0",objective="ttft"}': "0+80x30",
            'moerelay_slo_missed_total{role="decode",worker="decode-0",objective="ttft"}': "0+20x30",
        },
        {
            'moerelay_slo_met_total{role="decode",worker="decode-0",objective="ttft"}': "0+95x30",
            'moerelay_slo_missed_total{role="decode",worker="decode-0",objective="ttft"}': "0+5x30",
        },
    ),
    "MoerelayRequestsRefused": both(
        'moerelay_requests_refused_total{role="prefill",worker="prefill-0",cause="queue_full"}', "0+12x30", "0+3x30"
    ),
    "MoerelayKvCacheFull": Situation(
        {f"moerelay_kv_cache_usage_perc{D}": "0.99x30", f"moerelay_requests_waiting{D}": "4x30"},
        {f"moerelay_kv_cache_usage_perc{D}": "0.99x30", f"moerelay_requests_waiting{D}": "0x30"},
    ),
    "MoerelayPreemptions": both(f"moerelay_preemptions_total{D}", "0+120x30", "0+30x30"),
    "MoerelayFallback": both("moerelay_aggregated_fallbacks_total", "0x10 0+5x20", "5x30"),
    "MoerelayPaused": both(f"moerelay_pause_state{D}", "0x3 2x27", "0x3 2x10 0x17"),
    "MoerelayRouterSaturated": Situation(
        {
            'process_cpu_seconds_total{job="moerelay-router",instance="r:8000"}': "0+114x30",
            'moerelay_router_processes{job="moerelay-router",instance="r:8000"}': "2x30",
        },
        {
            'process_cpu_seconds_total{job="moerelay-router",instance="r:8000"}': "0+57x30",
            'moerelay_router_processes{job="moerelay-router",instance="r:8000"}': "2x30",
        },
    ),
}


#: Further ones: series that end, workers that are there and of no use, refusals that are meant.
FURTHER = {
    "MoerelayRouterDown": both('up{job="moerelay-router",instance="r:8000"}', "1x5 stale", "1x30"),
    "MoerelayNoWorkers, forgotten by discovery": Situation(
        {f"moerelay_worker_up{P}": "1x5 0x2 stale", 'moerelay_workers_usable{role="prefill"}': "1x5 0x25"},
        {f"moerelay_worker_up{P}": "1x5 0x2 stale", 'moerelay_workers_usable{role="prefill"}': "1x30"},
    ),
    "MoerelayCertificateEnds, of a router": both(
        'moerelay_certificate_seconds_left{certificate="cluster"}', "-60x30", "2678400x30"
    ),
    "MoerelayCertificateEnds, of HTTPS": both(
        'moerelay_certificate_seconds_left{certificate="https"}', "1209660-60x30", "1213200-60x30"
    ),
    "MoerelayNoWorkers, never found": both('moerelay_workers_usable{role="decode"}', "0x30", "2x30"),
    "MoerelayNoWorkers, all refused": Situation(
        {f"moerelay_worker_up{D}": "1x30", 'moerelay_workers_usable{role="decode"}': "1x5 0x25"},
        {f"moerelay_worker_up{D}": "1x30", 'moerelay_workers_usable{role="decode"}': "1x30"},
    ),
    "MoerelayErrors, of a planned pause": Situation(
        {
            'moerelay_router_errors_total{type="ServiceUnavailableError"}': "0+50x30",
            'moerelay_router_requests_total{endpoint="generate",outcome="error"}': "0+50x30",
        },
        {
            'moerelay_router_errors_total{type="PausedError"}': "0+50x30",
            'moerelay_router_requests_total{endpoint="generate",outcome="error"}': "0+50x30",
        },
    ),
}


def test_every_rule_has_a_situation() -> None:
    assert SITUATIONS.keys() == {alert.name for alert in ALERTS}


def case(name: str, series: dict[str, str], *, fires: bool) -> dict[str, object]:
    """What promtool is to find after 25 minutes; of JSON, which is YAML too."""
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                "eval_time": "25m",
                "exp_samples": [{"labels": "{}", "value": int(fires)}],
            }
        ],
    }


@needs_promtool
def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = [
        test
        for title, situation in (*SITUATIONS.items(), *FURTHER.items())
        for name in [title.partition(",")[0]]
        for test in (case(name, situation.firing, fires=True), case(name, situation.quiet, fires=False))
    ]
    path = tmp_path / "tests.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_two_routers_are_not_counted_twice(tmp_path: Path) -> None:
    """Each shows all workers; of 2 failed handoffs there are no 4."""
    name = "MoerelayHandoffFailures"
    labels = (
        'role="decode",worker="decode-0",instance="r1:8000"',
        'role="decode",worker="decode-0",instance="r2:8000"',
    )
    series = {f"moerelay_handoff_failures_total{{{each}}}": "0x20 2x10" for each in labels}
    path = tmp_path / "tests.yml"
    tests = [case(name, series, fires=False)]
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "config", "--syntax-only", str(config)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_what_is_generated_is_up_to_date(path: Path) -> None:
    """Otherwise: python -m deploy.monitoring.generate"""
    assert path.read_text() == files()[path]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_a_runbook(alert: object) -> None:
    [known] = [each for each in ALERTS if each is alert]
    text = (ROOT / known.runbook).read_text()
    assert text.startswith(f"# {known.name}\n")
    for heading in ("## What it means", "## Where to look", "## What to do"):
        assert f"\n{heading}\n" in text
    assert f"({known.name}.md)" in (ROOT / "docs" / "runbooks" / "index.md").read_text()


def test_there_is_no_runbook_without_an_alert() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "runbooks").glob("*.md")} - {"index"}
    assert pages == {alert.name for alert in ALERTS}


METRIC = re.compile(r"\b(?:moerelay_\w+|process_\w+|up)\b(?=[{\[ )]|$)")


def documented() -> set[str]:
    """Names in docs/metrics.md, which another test compares with what processes show."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    return set(re.findall(r"^\| `(\w+)`", text, re.M))


@pytest.mark.parametrize(
    "expr",
    [alert.expr for alert in ALERTS]
    + [query.expr for section in SECTIONS for panel in section.panels for query in panel.queries],
)
def test_every_query_is_about_metrics_that_exist(expr: str) -> None:
    named = set(METRIC.findall(expr)) - {"up"}
    known = documented()
    assert expr.startswith("up{") or named
    for name in named:
        assert name in known or name.removesuffix("_bucket") in known, name


def test_the_dashboard_has_a_panel_at_every_place_once() -> None:
    panels = json.loads((ROOT / "deploy/grafana/dashboards/moerelay.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
