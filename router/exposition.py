"""/metrics: the router's families and every worker's, merged by name into one Prometheus text."""

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from structlog import get_logger

from common.errors import MoerelayError
from common.pb import worker_pb2
from router.calls import worker_errors
from router.fleet import Fleet
from router.processes.gauges import Readings, of_all
from router.worker import Worker
from router.worker_state import State

log = get_logger()


class MergedFamilies(Collector):
    """Families of several sources; those of one name become one, their samples side by side."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, families: Iterable[Metric], labels: dict[str, str] | None = None) -> None:
        """Adds one source. `labels` say where a sample comes from, unless it says so itself."""
        for family in families:
            known = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [s._replace(labels={**(labels or {}), **s.labels}) for s in family.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


async def exposition(
    own: CollectorRegistry, fleet: Fleet, timeout_s: float, *, others: Iterable[Readings] = ()
) -> bytes:
    """Prometheus text of the router and of every worker that answers in time.

    Args:
        others: gauges of the router's other processes.
    """
    merged = MergedFamilies()
    merged.add(of_all(own.collect(), others))
    alive = [worker for worker in fleet.workers if worker.state is not State.DEAD]
    answers = await asyncio.gather(*(_of_worker(worker, timeout_s) for worker in alive))
    for worker, text in zip(alive, answers, strict=True):
        merged.add(text_string_to_metric_families(text), {"worker": worker.id, "role": worker.side})
    return generate_latest(merged)


async def _of_worker(worker: Worker, timeout_s: float) -> str:
    """Empty if the worker does not answer: its absence shows in `moerelay_worker_up`."""
    try:
        with worker_errors(worker.id):
            reply = await worker.control.Metrics(worker_pb2.MetricsRequest(), timeout=timeout_s)
    except MoerelayError as error:
        log.warning("no_metrics", worker=worker.id, reason=error.message)
        return ""
    return reply.exposition.decode()
