"""Histograms of all processes of a router on a Prometheus registry, for one thread."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common.histogram import BucketCounts
from router.processes.counter_memory import CounterMemory


class _SharedCounts(BucketCounts):
    """One histogram: this process adds to its own part of it."""

    __slots__ = ("_shared",)

    def __init__(self, key: str, buckets: Sequence[float], memory: CounterMemory) -> None:
        self._shared = memory.reserve(key, self.num_cells(buckets))
        super().__init__(buckets, self._shared.own)

    def of_all(self) -> BucketCounts:
        """What all processes have observed until now."""
        return BucketCounts(self._bounds[:-1], self._shared.totals())


class LatencyHistogram(_SharedCounts, Collector):
    """One without labels."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        memory: CounterMemory,
        registry: CollectorRegistry,
    ) -> None:
        super().__init__(name, buckets, memory)
        self._name = name
        self._documentation = documentation
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        counts = self.of_all()
        yield HistogramMetricFamily(self._name, self._documentation, counts.buckets, counts.sum)


class LabelledHistograms(Collector):
    """One for each value of a label, all of which are known beforehand."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        label: tuple[str, Sequence[str]],
        memory: CounterMemory,
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label, values = label
        self._counts = {value: _SharedCounts(f"{name} {value}", buckets, memory) for value in values}
        registry.register(self)

    def __getitem__(self, value: str) -> BucketCounts:
        return self._counts[value]

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=[self._label])

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, own in self._counts.items():
            counts = own.of_all()
            family.add_metric([value], counts.buckets, counts.sum)
        yield family
