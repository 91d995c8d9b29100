"""What the router knows of its workers, as gauges."""

from prometheus_client import CollectorRegistry, Gauge

from router.fleet import Fleet
from router.worker_state import State


class FleetGauges:
    """As the fleet was at the last `refresh`."""

    def __init__(self, fleet: Fleet, registry: CollectorRegistry) -> None:
        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(f"moerelay_{name}", documentation, labels, registry=registry)

        self._fleet = fleet
        self._up = gauge("worker_up", "1 if the worker is healthy.", "worker", "role")
        self._refused = gauge("worker_refused", "1 if the worker does not fit.", "worker", "role")
        self._usable = gauge("workers_usable", "Workers that take requests.", "role")
        self._listed = gauge("discovery_workers", "Addresses that a source lists.", "role", "source")
        self._failing = gauge("discovery_failing", "1 if its last lookup failed.", "role", "source")

    def refresh(self) -> None:
        """Workers that are no longer known have no samples."""
        self._up.clear()
        self._refused.clear()
        for worker in self._fleet.workers:
            self._up.labels(worker.id, worker.side).set(worker.state is State.HEALTHY)
            self._refused.labels(worker.id, worker.side).set(worker.refused is not None)
        for side, count in self._fleet.num_usable().items():
            self._usable.labels(side).set(count)
        for listing in self._fleet.listings:
            if not listing.is_static:
                self._listed.labels(listing.side, listing.source).set(len(listing.addresses))
                self._failing.labels(listing.side, listing.source).set(listing.failure is not None)
