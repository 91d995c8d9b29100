"""A histogram of seconds on a Prometheus registry."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector

from common.histogram import BucketCounts


class LatencyHistogram(BucketCounts, Collector):
    """For one thread."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        super().__init__(buckets)
        self._name = name
        self._documentation = documentation
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._name, self._documentation, self.buckets, self.sum)
