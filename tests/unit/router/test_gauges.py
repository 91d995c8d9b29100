"""One value for a gauge of several router processes."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from common.config import RouterSettings
from router.app import create_app
from router.keys import METRICS
from router.processes.gauges import COMBINED, Readings, of_all, readings
from tests.unit.router.cluster import client_of

DAY_S = 24 * 3600.0


def registry_with(name: str, value: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge(name, "Of a test.", registry=registry).set(value)
    return registry


def values(own: CollectorRegistry, others: Iterable[Readings]) -> list[float]:
    return [sample.value for family in of_all(own.collect(), others) for sample in family.samples]


@pytest.mark.parametrize(
    ("name", "each", "combined"),
    [
        ("moerelay_router_in_flight", (3, 4, 0), 7),
        ("moerelay_router_processes", (1, 1, 1), 3),
        ("process_resident_memory_bytes", (2e8, 3e8, 1e8), 6e8),
        # Nobody is hurt by the certificate that ends last, nor by the process that has descriptors left.
        ("moerelay_certificate_seconds_left", (400 * DAY_S, 3 * DAY_S, 90 * DAY_S), 3 * DAY_S),
        ("process_open_fds", (20, 1000, 30), 1000),
        ("process_max_fds", (1024, 4096, 4096), 1024),
        ("moerelay_worker_up", (1, 1, 0), 0),
        ("moerelay_worker_refused", (0, 0, 1), 1),
        ("process_start_time_seconds", (100, 100, 160), 160),
    ],
)
def test_what_is_shown_does_not_depend_on_who_is_asked(name: str, each: list[float], combined: float) -> None:
    registries = [registry_with(name, value) for value in each]
    said = [readings(registry) for registry in registries]
    for index, registry in enumerate(registries):
        assert values(registry, said[:index] + said[index + 1 :]) == [combined]


def test_a_process_that_ended_is_in_no_gauge() -> None:
    assert values(registry_with("moerelay_router_in_flight", 2), []) == [2]


def test_counters_are_no_readings() -> None:
    registry = registry_with("moerelay_router_in_flight", 2)
    Counter("moerelay_router_requests", "Requests.", registry=registry).inc()
    assert readings(registry) == {"moerelay_router_in_flight": [({}, 2)]}


def test_what_a_process_does_not_know_is_no_reading() -> None:
    """A certificate of which only OpenSSL can tell the end, say; JSON has no NaN."""
    assert readings(registry_with("moerelay_certificate_seconds_left", math.nan)) == {
        "moerelay_certificate_seconds_left": []
    }


async def test_it_is_decided_of_every_gauge(tmp_path: Path) -> None:
    """Of all that a router may show, with cluster keys as without."""
    app = create_app(RouterSettings())
    async with client_of(app):
        shown = readings(app[METRICS].registry).keys()
    assert shown | {"moerelay_certificate_seconds_left"} == COMBINED.keys()
