"""Prometheus of the profile `monitoring`, as it is configured for the stack, and what Grafana asks of it."""

import asyncio
import os

import aiohttp
import pytest

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.dashboard import SECTIONS
from tests.compose.load import under_load
from tests.compose.stack import Stack
from tests.compose.watch import START_S, wait_ready
from tests.e2e.cluster import Client, JsonObject, until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(400)]

EXPRESSIONS = [query.expr for section in SECTIONS for panel in section.panels for query in panel.queries]
#: Series that begin with the first error or difference, or with an objective: none of them has to be there.
MAY_BE_SILENT = (
    "moerelay_router_errors_total",
    "moerelay_self_check_differences_total",
    "moerelay_slo_met_total",
    "moerelay_slo_missed_total",
)
#: What Grafana makes of it: four times the interval of deploy/prometheus/prometheus.yml.
RATE_INTERVAL = "20s"


class Prometheus:
    """Its HTTP API."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self.url = url

    async def get(self, path: str, **parameters: str) -> JsonObject:
        """The data of an answer, which has no warnings."""
        async with self._client.session.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        assert response.status == 200, (parameters, answer)
        assert answer["status"] == "success", (parameters, answer)
        assert "warnings" not in answer, (parameters, answer)
        data: JsonObject = answer["data"]
        return data

    async def answers(self) -> bool:
        """Whether it has started: until then its API says 503."""
        try:
            async with self._client.session.get(f"{self.url}/-/ready") as response:
                return response.status == 200
        except (OSError, aiohttp.ClientError):
            return False

    async def series(self, expression: str) -> list[JsonObject]:
        """What an expression is now."""
        found: list[JsonObject] = (await self.get("query", query=expression))["result"]
        return found


@pytest.fixture
async def prometheus(stack: Stack, client: Client) -> Prometheus:
    """Of the stack, when it has read the router."""
    if "PROMETHEUS_IMAGE" not in os.environ:
        pytest.skip("THE MONITORING IS NOT TESTED: prometheus is missing; on Debian: scripts/install_promtool.sh")
    await wait_ready(client)
    await asyncio.to_thread(stack.up, "prometheus", dependencies=False)
    found = Prometheus(client, stack.prometheus_url)

    async def reads() -> bool:
        return bool(await found.series("moerelay_worker_up"))

    await until(found.answers, START_S)
    await until(reads, START_S)
    return found


async def test_prometheus_reads_the_router_and_the_rules(prometheus: Prometheus) -> None:
    """By its DNS name and with its key; every rule can be evaluated, and none fires."""

    async def targets() -> list[tuple[str, str, str]]:
        active = (await prometheus.get("targets"))["activeTargets"]
        return [(target["labels"]["job"], target["health"], target["lastError"]) for target in active]

    async def rules() -> list[JsonObject]:
        return [rule for group in (await prometheus.get("rules"))["groups"] for rule in group["rules"]]

    async def settled() -> bool:
        # One reading may take too long on a busy machine.
        evaluated = all(rule["health"] != "unknown" for rule in await rules())
        return evaluated and await targets() == [("moerelay-router", "up", "")]

    await until(settled, START_S)
    found = await rules()
    assert {rule["name"]: (rule["health"], rule.get("lastError")) for rule in found} == {
        alert.name: ("ok", None) for alert in ALERTS
    }
    assert [rule["name"] for rule in found if rule["state"] == "firing"] == []
    roles = {series["metric"]["role"]: series["value"][1] for series in await prometheus.series("moerelay_worker_up")}
    assert roles == {"prefill": "1", "decode": "1"}


async def test_every_question_of_the_dashboard_is_answered(prometheus: Prometheus, client: Client) -> None:
    """Without an error; and there is something to see, while there are requests."""
    async with under_load(client):

        async def counted() -> bool:
            return bool(await prometheus.series(f"rate(moerelay_router_requests_total[{RATE_INTERVAL}]) > 0"))

        await until(counted, START_S)
        asked = {each: each.replace("$__rate_interval", RATE_INTERVAL) for each in EXPRESSIONS}
        silent = [each for each, expression in asked.items() if not await prometheus.series(expression)]
    assert [each for each in silent if not any(name in each for name in MAY_BE_SILENT)] == []
