"""A worker's Prometheus metrics, read from the engine and the handoff when they are scraped: no second bookkeeping."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.engine.loop import Engine
from common.engine.request import RequestId
from common.engine.stages import StageObserver
from common.histogram import STAGE_BUCKETS, BucketCounts
from common.worker.control import PauseState, WorkerControl
from common.worker.spans import RequestSpans
from common.worker.weights import Weights

#: Reads one number at scrape time.
Reading = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric; with a `label`, one sample for each of its values."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    documentation: str
    #: By value of `label`; without one there is the empty value only.
    readings: Mapping[str, Reading]
    label: str | None = None


class WorkerMetrics(Collector):
    """Metrics of one worker, each labelled with its role and name, but for those of its process.

    Where those come together with other processes', whoever gathers them adds the labels.
    """

    def __init__(self, role: str, worker_id: str) -> None:
        self._labels = (role, worker_id)
        self._families: list[_Family] = []
        self._histograms: list[tuple[str, str, BucketCounts]] = []
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def add_process(self) -> None:
        """Cpu time, memory and open files of this process, under the names that every Prometheus client uses."""
        ProcessCollector(registry=self._registry)

    def gauge(self, name: str, documentation: str, reading: Reading) -> None:
        self._families.append(_Family(GaugeMetricFamily, name, documentation, {"": reading}))

    def gauges(self, name: str, documentation: str, label: str, readings: Mapping[str, Reading]) -> None:
        """One gauge per value of `label`."""
        self._families.append(_Family(GaugeMetricFamily, name, documentation, readings, label))

    def counter(self, name: str, documentation: str, reading: Reading) -> None:
        self._families.append(_Family(CounterMetricFamily, name, documentation, {"": reading}))

    def counters(self, name: str, documentation: str, label: str, readings: Mapping[str, Reading]) -> None:
        """One counter per value of `label`."""
        self._families.append(_Family(CounterMetricFamily, name, documentation, readings, label))

    def histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Callable[[float], None]:
        """Returns what takes one observation, on one thread."""
        counts = BucketCounts(buckets)
        self.counted(name, documentation, counts)
        return counts.observe

    def counted(self, name: str, documentation: str, counts: BucketCounts) -> None:
        """A histogram that somebody else adds to."""
        self._histograms.append((name, documentation, counts))

    def collect(self) -> Iterable[Metric]:
        for each in self._families:
            own = () if each.label is None else (each.label,)
            family = each.kind(f"moerelay_{each.name}", each.documentation, labels=("role", "worker", *own))
            for value, reading in each.readings.items():
                family.add_metric((*self._labels, value)[: 2 + len(own)], reading())
            yield family
        for name, documentation, counts in self._histograms:
            histogram = HistogramMetricFamily(f"moerelay_{name}", documentation, labels=("role", "worker"))
            histogram.add_metric(self._labels, counts.buckets, counts.sum)
            yield histogram

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)


class StageTimes(StageObserver):
    """How long requests spend in each stage of an engine, as histograms and as spans.

    The names are vLLM's, where it has the stage. A handoff is no span here: what happens meanwhile happens elsewhere.
    """

    def __init__(self, metrics: WorkerMetrics, spans: RequestSpans) -> None:
        self._spans = spans
        self._queue = self._histogram(metrics, "request_queue_time", "Arrival to a seat and blocks.")
        self._prefill = self._histogram(metrics, "request_prefill_time", "Seat to first token, computed here.")
        self._handoff = self._histogram(metrics, "request_handoff_time", "Seat to prompt taken over.")
        self._decode = self._histogram(metrics, "request_decode_time", "First token to last one, of each choice.")

    @staticmethod
    def _histogram(metrics: WorkerMetrics, name: str, documentation: str) -> Callable[[float], None]:
        return metrics.histogram(f"{name}_seconds", documentation, STAGE_BUCKETS)

    def seated(self, request_id: RequestId, waited_s: float) -> None:
        self._queue(waited_s)
        self._spans.past(request_id, "queue", waited_s)

    def prefilled(self, request_id: RequestId, took_s: float) -> None:
        self._prefill(took_s)
        self._spans.past(request_id, "compute", took_s)

    def handed_over(self, request_id: RequestId, took_s: float) -> None:
        self._handoff(took_s)

    def decoded(self, request_id: RequestId, took_s: float) -> None:
        self._decode(took_s)
        self._spans.past(request_id, "steps", took_s)


def engine_metrics(metrics: WorkerMetrics, engine: Engine, spans: RequestSpans) -> None:
    """What every worker reports about its engine. Of requests that are traced the stages become `spans`."""
    stats = engine.stats
    metrics.gauge("requests_running", "Sequences in the running batch.", lambda: engine.load().running)
    metrics.gauge("requests_waiting", "Sequences that wait for blocks.", lambda: engine.load().waiting)
    metrics.gauge("handoffs_in_flight", "Sequences being handed over.", lambda: engine.load().handoffs)
    metrics.gauge("kv_blocks_used", "KV blocks held by live sequences.", lambda: engine.load().kv_blocks_used)
    metrics.gauge("kv_blocks_cached", "KV blocks held only by the cache.", lambda: engine.load().kv_blocks_cached)
    metrics.gauge("kv_blocks", "KV blocks of the worker.", lambda: engine.load().kv_blocks_total)
    metrics.gauge("kv_cache_usage_perc", "Share of them held by live sequences, 1 is all.", partial(_usage, engine))
    metrics.counter("prompt_tokens_computed", "Prompt tokens forwarded here.", lambda: stats.prompt_tokens_computed)
    metrics.counter("generated_tokens", "Tokens sampled here.", lambda: stats.generated_tokens)
    metrics.counter("engine_steps", "Forward passes.", lambda: stats.steps)
    metrics.counter("decode_steps", "Forward passes that decoded at least one sequence.", lambda: stats.decode_steps)
    metrics.counter("engine_step_failures", "Forward passes that raised.", lambda: stats.step_failures)
    metrics.counter("routing_rows_captured", "Routing rows recorded here.", lambda: stats.routing_rows_captured)
    metrics.counter("prefix_cache_queries_tokens", "Prompt tokens looked up.", lambda: stats.prefix_cache_queries)
    metrics.counter("prefix_cache_hit_tokens", "Those of them that were cached.", lambda: stats.prefix_cache_hits)
    _preemption_metrics(metrics, engine)
    _goodput_metrics(metrics, engine)
    metrics.counted("iteration_tokens_total", "Tokens of each forward pass.", stats.step_tokens)
    engine.observe_stages(StageTimes(metrics, spans))


def _usage(engine: Engine) -> float:
    load = engine.load()
    return load.kv_blocks_used / load.kv_blocks_total


def _preemption_metrics(metrics: WorkerMetrics, engine: Engine) -> None:
    """How often sequences lost their blocks, and what that costs."""
    stats = engine.stats
    metrics.counter("preemptions", "Times that a sequence lost its KV blocks.", lambda: stats.preemptions)
    metrics.counter("preemptions_swapped", "Those whose KV was kept.", lambda: stats.preemptions_swapped)
    metrics.counter("preemptions_recomputed", "Those whose KV was not kept.", lambda: stats.preemptions_recomputed)
    metrics.counter("preemptions_beyond_swap_space", "Copies that exceed it.", lambda: stats.preemptions_beyond_bound)
    metrics.counter("swapped_tokens", "Positions copied to host memory.", lambda: stats.swapped_tokens)
    metrics.counter("recomputed_tokens", "Positions forwarded again.", lambda: stats.recomputed_tokens)
    metrics.gauge("requests_preempted", "Sequences that wait to go on.", lambda: engine.load().preempted)
    metrics.gauge("swap_bytes_used", "Host memory that holds their KV.", lambda: engine.load().swap_bytes_used)
    metrics.gauge("swap_bytes", "Host memory meant for it.", lambda: engine.load().swap_bytes_total)


def _goodput_metrics(metrics: WorkerMetrics, engine: Engine) -> None:
    """Whether requests keep to their objectives, and how well steps are foretold, by which they are scheduled."""
    fit, attainment = engine.step_fit, engine.attainment
    metrics.counter("engine_step_seconds", "Time of foretold forward passes.", lambda: fit.measured_s)
    metrics.counter("engine_step_predicted_seconds", "What was foretold of it.", lambda: fit.predicted_s)
    metrics.gauge("engine_step_prediction_error", "Mean relative error lately.", lambda: fit.error)
    refused = {"queue_full": lambda: engine.num_refused_full, "slo_ttft": lambda: engine.num_refused_late}
    metrics.counters("requests_refused", "Requests that were refused (429).", "cause", refused)
    if not attainment.enabled:
        return
    tallies = {"ttft": attainment.ttft, "itl": attainment.itl, "all": attainment.all}
    met = {name: partial(getattr, tally, "met") for name, tally in tallies.items()}
    missed = {name: partial(getattr, tally, "missed") for name, tally in tallies.items()}
    metrics.counters("slo_met", "Requests that kept to an objective.", "objective", met)
    metrics.counters("slo_missed", "Requests that did not.", "objective", missed)


def control_metrics(metrics: WorkerMetrics, control: WorkerControl, weights: Weights) -> None:
    """Whether the worker serves, and how often its weights were replaced."""
    order = list(PauseState)
    metrics.gauge("pause_state", "0 running, 1 pausing, 2 paused.", lambda: order.index(control.state))
    metrics.gauge("sleep_level", "0 awake, 1 without KV cache, 2 without weights too.", lambda: control.sleep_level)
    metrics.counter("weight_updates", "Times that other weights were put to use.", lambda: weights.num_updates)
