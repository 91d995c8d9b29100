"""How hard it was for the cluster meanwhile: a run in which nothing had to give way proves less."""

from collections import Counter
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

from common.errors import InternalError
from deploy.client import ClusterClient
from deploy.verify.findings import count_of

_PREEMPTIONS, _HITS = "moerelay_preemptions_total", "moerelay_prefix_cache_hit_tokens_total"
#: As `role` in the workers' metrics, with the words of the report.
_SIDES = {"prefill": " on prefill", "decode": " on decode", "both": ""}


class Pressure:
    """Sums over all workers of what counts as pressure, at one moment or between two."""

    def __init__(self, preemptions: int, hits: Counter[str]) -> None:
        """`hits`: prompt tokens found in prefix caches, by role."""
        self.preemptions = preemptions
        self.hits = hits

    @classmethod
    async def read(cls, client: ClusterClient) -> Self:
        """What has been since the workers started. Raises MoerelayError."""
        return cls.of(await client.get_text("/metrics"))

    @classmethod
    def of(cls, exposition: str) -> Self:
        """From Prometheus text; a metric that no worker has told counts nothing. Raises InternalError if it is none."""
        preemptions, hits = 0, Counter[str]()
        try:
            samples = [s for family in text_string_to_metric_families(exposition) for s in family.samples]
        except ValueError as error:
            raise InternalError(f"/metrics is not in Prometheus' text format: {error}") from error
        for sample in samples:
            if sample.name == _PREEMPTIONS:
                preemptions += int(sample.value)
            elif sample.name == _HITS:
                hits[sample.labels["role"]] += int(sample.value)
        return cls(preemptions, hits)

    def since(self, earlier: "Pressure") -> "Pressure":
        roles = self.hits.keys() | earlier.hits.keys()
        hits = Counter({role: self.hits[role] - earlier.hits[role] for role in roles})
        return Pressure(self.preemptions - earlier.preemptions, hits)

    def __str__(self) -> str:
        """One line of the report."""
        found = [f"{self.hits[role]}{where}" for role, where in _SIDES.items() if role in self.hits]
        cached = f"prompt tokens found in the prefix cache: {', '.join(found) or 0}"
        return f"the cluster meanwhile: {count_of(self.preemptions, 'preemption')}; {cached}"
