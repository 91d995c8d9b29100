"""Counters of all processes of a router on a Prometheus registry, for one thread."""

from collections.abc import Iterable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from router.processes.counter_memory import CounterMemory


class CounterFamily(Collector):
    """A counter for each combination of its labels' values, all of which are known beforehand: each begins with 0, so
    that Prometheus sees the first of a kind as an increase.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        memory: CounterMemory,
        registry: CollectorRegistry,
        **labels: Iterable[str],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = tuple(labels)
        self._cells = {values: memory.reserve(" ".join((name, *values)), 1) for values in product(*labels.values())}
        registry.register(self)

    def inc(self, *values: str, by: float = 1) -> None:
        """The counter of these labels' values."""
        self._cells[values].own[0] += by

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, cells in self._cells.items():
            [total] = cells.totals()
            family.add_metric(values, total)
        yield family


class ProcessFamilies(Collector):
    """What prometheus_client shows of this process, but for the cpu time: that is of all processes.

    A process's share is what it was when somebody last looked, and stays that when it dies.
    """

    def __init__(self, memory: CounterMemory, registry: CollectorRegistry) -> None:
        self._process = ProcessCollector(registry=None)
        self._cpu_s = memory.reserve("process_cpu_seconds", 1)
        #: Of this process's predecessors.
        self._before_s: float = self._cpu_s.own[0]
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for family in self._process.collect():
            if family.type == "counter":
                assert family.name == "process_cpu_seconds"
                self._cpu_s.own[0] = self._before_s + family.samples[0].value
                [total_s] = self._cpu_s.totals()
                yield CounterMetricFamily(family.name, family.documentation, total_s)
            else:
                yield family
