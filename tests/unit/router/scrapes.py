"""Reads a router's /metrics again and again, as Prometheus does, and checks that no counter falls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Counts = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def counts_of(http: aiohttp.ClientSession, url: str) -> Counts:
    """Every sample of the router's counters and histograms; workers' have a label `worker`."""
    async with http.get(f"{url}/metrics") as response:
        assert response.status == 200
        text = await response.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        for sample in family.samples
        if "worker" not in sample.labels
    }


@asynccontextmanager
async def nothing_falls(http: aiohttp.ClientSession, url: str) -> AsyncIterator[list[Counts]]:
    """While the block runs. Yields what was read until now; each scrape should be a connection of its own."""
    seen: list[Counts] = []

    async def scrape() -> None:
        while True:
            now = await counts_of(http, url)
            for before in seen[-1:]:
                fallen = [key for key, value in before.items() if now.get(key, -1) < value]
                assert not fallen
            seen.append(now)

    async with asyncio.TaskGroup() as group:
        scraping = group.create_task(scrape())
        yield seen
        scraping.cancel()
    assert len(seen) > 1
