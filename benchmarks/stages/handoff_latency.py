"""From the end of a prefill to the first decode step, as the cluster itself tells it in /metrics."""

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.spread import Spread
from benchmarks.stages.conditions import Condition, Servers
from benchmarks.table import Quantity, Samples

PROMPT_TOKENS = 512
#: Enough that decode steps follow the handoff.
OUTPUT_TOKENS = 4
REQUESTS_PER_ROUND = 10

#: Histogram of the cluster by what it is called here.
METRICS = {
    "first token to acknowledgement": "moerelay_handoff_tail_seconds",
    "first token to running batch": "moerelay_handoff_commit_seconds",
}


class HandoffLatencyStage:
    """Requests one after the other; a histogram's sum grows by exactly one handoff's time each."""

    name = "handoff latency"

    def __init__(self, servers: Servers, condition: Condition, num_rounds: int) -> None:
        self.num_rounds = num_rounds
        self._servers = servers
        self._condition = condition

    async def measure(self, number: int) -> Samples:
        """See `Stage`."""
        load = await self._servers.load(self._condition)
        client = await self._servers.client(self._condition.server)
        found: dict[str, list[float]] = {}
        for _ in range(REQUESTS_PER_ROUND):
            before = sums(await client.get_text("/metrics"))
            await load.request(PROMPT_TOKENS, OUTPUT_TOKENS)
            after = sums(await client.get_text("/metrics"))
            for name in after:
                found.setdefault(name, []).append(1e3 * (after[name] - before.get(name, 0.0)))
        samples = Samples()
        for name, values in found.items():
            samples.add(self._condition.name, Quantity(name, "ms", higher_is_better=False), Spread.of(values).median)
        return samples


def sums(exposition: str) -> dict[str, float]:
    """Seconds that each of the histograms has counted so far, over all workers; without those that are not there."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            for name, metric in METRICS.items():
                if sample.name == f"{metric}_sum":
                    found[name] = found.get(name, 0.0) + sample.value
    return found
