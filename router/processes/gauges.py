"""Gauges of all processes of a router. Its counters and histograms need nothing: they are counted in one memory."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.registry import Collector

#: Of each family the labels and the values of its samples, as one process has them.
Readings = dict[str, list[tuple[dict[str, str], float]]]

#: What is shown of the values of all processes. Where each sees the same from its own connections and files, or has a
#: limit of its own, that is the worst one.
COMBINED: Mapping[str, Callable[[Iterable[float]], float]] = {
    "moerelay_router_in_flight": sum,
    "moerelay_router_processes": sum,
    "moerelay_certificate_seconds_left": min,
    "moerelay_worker_up": min,
    "moerelay_worker_refused": max,
    "moerelay_workers_usable": min,
    "moerelay_discovery_workers": min,
    "moerelay_discovery_failing": max,
    "process_virtual_memory_bytes": sum,
    "process_resident_memory_bytes": sum,
    "process_open_fds": max,
    "process_max_fds": min,
    # That of the youngest, so that it changes whenever one was replaced.
    "process_start_time_seconds": max,
}


def readings(own: Collector) -> Readings:
    """What a process tells the one that is asked; nothing of what it does not know: JSON has no NaN."""
    gauges = (family for family in own.collect() if family.type == "gauge")
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples if math.isfinite(sample.value)]
        for family in gauges
    }


def of_all(own: Iterable[Metric], others: Iterable[Readings]) -> Iterator[Metric]:
    """The families of this process, in which each gauge is that of all processes.

    A family that this process has not, because another one runs another version, is left out.
    """
    others = list(others)
    for family in own:
        if family.type != "gauge":
            yield family
            continue
        values: defaultdict[tuple[tuple[str, str], ...], list[float]] = defaultdict(list)
        mine = [(sample.labels, sample.value) for sample in family.samples]
        for labels, value in [*mine, *(reading for each in others for reading in each.get(family.name, ()))]:
            values[tuple(sorted(labels.items()))].append(value)
        combined = Metric(family.name, family.documentation, family.type)
        for series, each in values.items():
            combined.add_sample(family.name, dict(series), COMBINED[family.name](each))
        yield combined
