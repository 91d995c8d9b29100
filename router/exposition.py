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


#: Gauges that count something of each process; the others say the same in all of them, or cannot be added.
_COUNTING_GAUGES = frozenset(
    {
        "moerelay_router_in_flight",
        "moerelay_router_processes",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    }
)


def added_up(own: Iterable[Metric], others: Iterable[Iterable[Metric]]) -> list[Metric]:
    """One process's families with the counts of the others added to its own."""
    families = {family.name: family for family in own}
    for family in (family for other in others for family in other):
        mine = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        if family.type == "gauge" and family.name not in _COUNTING_GAUGES:
            continue
        values = {(sample.name, *sorted(sample.labels.items())): sample for sample in mine.samples}
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            known = values.get(key)
            values[key] = sample if known is None else known._replace(value=known.value + sample.value)
        mine.samples = list(values.values())
    return list(families.values())


async def exposition(own: CollectorRegistry, others: Iterable[str], fleet: Fleet, timeout_s: float) -> bytes:
    """Prometheus text of the router and of every worker that answers in time.

    `others`: what the router's other processes say of themselves.
    """
    merged = MergedFamilies()
    merged.add(added_up(own.collect(), map(text_string_to_metric_families, others)))
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
