"""When somebody should be told, in Prometheus' words.

Several routers each show every worker's metrics, so those are first reduced to one series per worker.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule; docs/runbooks/NAME.md says what to do. `lasting`: for how long it has to be true."""

    name: str
    severity: Severity
    expr: str
    lasting: str
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """Where in the repository."""
        return f"docs/runbooks/{self.name}.md"


def per_worker(metric: str, *labels: str) -> str:
    """A worker's series once, however many routers show it."""
    return f"max by ({', '.join(('role', 'worker', *labels))}) ({metric})"


def quantile(share: float, histogram: str, *labels: str) -> str:
    """Of a router's histogram, over all routers and five minutes."""
    by = ", ".join(("le", *labels))
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}_bucket[5m])))"


def worker_quantile(share: float, histogram: str, *labels: str) -> str:
    """Of a worker's histogram, over all workers of a role and five minutes."""
    rates = per_worker(f"rate({histogram}_bucket[5m])", "le", *labels)
    return f"histogram_quantile({share}, sum by ({', '.join(('le', 'role', *labels))}) ({rates}))"


#: Not PausedError: who pauses a cluster wants its requests to be refused.
_SERVER_ERRORS = "InternalServerError|WorkerLostError|Handoff.*Error|ServiceUnavailableError"
_MET, _MISSED = (per_worker(f"rate(moerelay_slo_{how}_total[10m])", "objective") for how in ("met", "missed"))
_DAY_S = 24 * 3600


def _left(certificate: str) -> str:
    """Seconds, of each process of a router that shows it or knows of it."""
    series = f'moerelay_certificate_seconds_left{{certificate="{certificate}"}}'
    return f"min by (certificate, role, worker, instance) ({series})"


ALERTS = (
    Alert(
        "MoerelayRouterDown",
        "critical",
        'up{job="moerelay-router"} == 0 or absent(up{job="moerelay-router"})',
        "1m",
        "{{ with $labels.instance }}Router {{ . }} does not answer{{ else }}Prometheus knows no router{{ end }}",
        "Prometheus has not been able to read its /metrics for a minute, or finds no address of a router.",
    ),
    Alert(
        "MoerelayNoWorkers",
        "critical",
        # Not of the workers' own series: those of the last dead worker vanish with it.
        "min by (role) (moerelay_workers_usable) == 0",
        "30s",
        "No {{ $labels.role }} worker can be used",
        "Requests are refused with 503, or all computed by decode workers where --allow-aggregated-fallback is given.",
    ),
    Alert(
        "MoerelayWorkerDown",
        "warning",
        f"{per_worker('moerelay_worker_up')} == 0",
        "2m",
        "The {{ $labels.role }} worker {{ $labels.worker }} is not healthy",
        "It does not answer heartbeats, hangs in a step, or drains. The others take its requests.",
    ),
    Alert(
        "MoerelayWorkerRefused",
        "warning",
        f"{per_worker('moerelay_worker_refused')} == 1",
        "2m",
        "The {{ $labels.role }} worker {{ $labels.worker }} does not fit the others",
        "It lives, and is not used, because its model, weights, numerics or settings differ. /cluster says in what.",
    ),
    Alert(
        "MoerelayDiscoveryFailing",
        "warning",
        "max without (instance) (moerelay_discovery_failing) == 1",
        "2m",
        "Workers cannot be looked up",
        "The last lookup of a source of workers failed. Those that are known are used on; new ones are not found.",
    ),
    Alert(
        "MoerelayCertificateEnds",
        "warning",
        # What renews HTTPS certificates by itself takes its time until some 30 days before the end.
        f"{_left('cluster')} < {30 * _DAY_S} or {_left('https')} < {14 * _DAY_S}",
        "10m",
        "The {{ $labels.certificate }} certificate of {{ or $labels.worker $labels.instance }} ends soon",
        "That of a cluster in less than 30 days, that for HTTPS in less than 14. From then on nobody connects to the "
        "process any more: no router and no worker, or no client.",
    ),
    Alert(
        "MoerelayErrors",
        "critical",
        f'sum(rate(moerelay_router_errors_total{{type=~"{_SERVER_ERRORS}"}}[5m]))'
        " / sum(rate(moerelay_router_requests_total[5m])) > 0.02",
        "5m",
        "More than 2 % of requests fail",
        "Errors that clients are not to blame for, over five minutes.",
    ),
    Alert(
        "MoerelayHandoffFailures",
        "warning",
        f"sum by (role) ({per_worker('increase(moerelay_handoff_failures_total[10m])')}) > 3",
        "0s",
        "Handoffs fail on {{ $labels.role }} workers",
        "Each one is a request that ended in an error. More than three in ten minutes.",
    ),
    Alert(
        "MoerelayHandoffMalformed",
        "warning",
        f"{per_worker('increase(moerelay_handoff_malformed_total[10m])')} > 0",
        "0s",
        "Something foreign talks to the handoff port of {{ $labels.worker }}",
        "Messages came that no prefill worker of this version sends.",
    ),
    Alert(
        "MoerelayEngineStepFailures",
        "critical",
        f"{per_worker('increase(moerelay_engine_step_failures_total[10m])')} > 0",
        "0s",
        "Forward passes fail on {{ $labels.worker }}",
        "Every request of such a step ended in an error. The log has the traceback.",
    ),
    Alert(
        "MoerelaySelfCheckDifference",
        "critical",
        f"{per_worker('increase(moerelay_self_check_differences_total[1h])', 'kind')} > 0",
        "0s",
        "{{ $labels.worker }} has served something else than a solo run: {{ $labels.kind }}",
        "The promise of exact tokens, logprobs and rows is broken. A file of the request is in --self-check-dir.",
    ),
    Alert(
        "MoerelayQueueTime",
        "warning",
        f"{worker_quantile(0.95, 'moerelay_request_queue_time_seconds')} > 5",
        "5m",
        "Requests wait long for {{ $labels.role }} workers",
        "One in twenty has waited more than five seconds for a seat and blocks.",
    ),
    Alert(
        "MoerelayTimeToFirstToken",
        "warning",
        f"{quantile(0.95, 'moerelay_time_to_first_token_seconds')} > 10",
        "10m",
        "First tokens are late",
        "One request in twenty has waited more than ten seconds for its first token.",
    ),
    Alert(
        "MoerelayInterTokenLatency",
        "warning",
        f"{quantile(0.95, 'moerelay_inter_token_latency_seconds')} > 0.5",
        "10m",
        "Streams are slow",
        "One token in twenty has come more than half a second after the one before.",
    ),
    Alert(
        "MoerelayObjectivesMissed",
        "warning",
        f"sum by (objective) ({_MISSED}) / sum by (objective) ({_MET} + {_MISSED}) > 0.1",
        "10m",
        "More than 10 % of requests miss the objective {{ $labels.objective }}",
        "Of those that were accepted; see --slo-ttft and --slo-itl.",
    ),
    Alert(
        "MoerelayRequestsRefused",
        "warning",
        f"sum by (cause) ({per_worker('rate(moerelay_requests_refused_total[5m])', 'cause')}) > 0.1",
        "5m",
        "Workers refuse requests: {{ $labels.cause }}",
        "Clients get 429. More than one in ten seconds.",
    ),
    Alert(
        "MoerelayKvCacheFull",
        "warning",
        f"{per_worker('moerelay_kv_cache_usage_perc')} > 0.95 and {per_worker('moerelay_requests_waiting')} > 0",
        "10m",
        "The KV cache of {{ $labels.worker }} is full, and requests wait",
        "Live sequences hold more than 95 % of its blocks.",
    ),
    Alert(
        "MoerelayPreemptions",
        "warning",
        f"{per_worker('rate(moerelay_preemptions_total[5m])')} > 1",
        "10m",
        "{{ $labels.worker }} preempts sequences all the time",
        "More than one per second gives its blocks up, and is copied back or computed again later.",
    ),
    Alert(
        "MoerelayFallback",
        "warning",
        "sum(increase(moerelay_aggregated_fallbacks_total[5m])) > 0",
        "2m",
        "Decode workers compute whole requests",
        "No prefill worker is healthy, so that prompts slow streams down.",
    ),
    Alert(
        "MoerelayPaused",
        "warning",
        f"{per_worker('moerelay_pause_state')} > 0",
        "15m",
        "{{ $labels.worker }} has been paused for a quarter of an hour",
        "It takes no requests until somebody resumes it. A trainer may have died in the middle of a weight update.",
    ),
    Alert(
        "MoerelayRouterSaturated",
        "warning",
        'sum by (instance) (rate(process_cpu_seconds_total{job="moerelay-router",worker=""}[5m]))'
        " / sum by (instance) (moerelay_router_processes) > 0.9",
        "10m",
        "Router {{ $labels.instance }} has no cpu time left",
        "Each of its processes computes more than 90 % of the time, so that streams wait for the router.",
    ),
)
