"""Histograms on a Prometheus registry, for one thread."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common.histogram import BucketCounts


class LatencyHistogram(BucketCounts, Collector):
    """One without labels."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        super().__init__(buckets)
        self._name = name
        self._documentation = documentation
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, self.buckets, self.sum)


class LabelledHistograms(Collector):
    """One for each value of a label, all of which are known beforehand."""

    def __init__(
        self,
        name: str,
        documentation: str,
        buckets: Sequence[float],
        label: tuple[str, Sequence[str]],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label, values = label
        self._counts = {value: BucketCounts(buckets) for value in values}
        registry.register(self)

    def __getitem__(self, value: str) -> BucketCounts:
        return self._counts[value]

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, labels=[self._label])

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, counts in self._counts.items():
            family.add_metric([value], counts.buckets, counts.sum)
        yield family
