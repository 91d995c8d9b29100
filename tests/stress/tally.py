"""What a stress run did: without these counts nobody knows whether it tried anything."""

from dataclasses import dataclass, field, fields

from common.engine.stats import EngineStats


@dataclass
class Tally:
    """Sums over engines and rounds."""

    rounds: int = 0
    requests: int = 0
    choices: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions_swapped: int = 0
    preemptions_recomputed: int = 0
    recomputed_tokens: int = 0
    prefix_hit_tokens: int = 0
    cancellations: int = 0
    aborts: int = 0
    cache_resets: int = 0
    weight_updates: int = 0
    straddling: int = 0
    handoffs: int = 0
    local_prefills: int = 0
    #: One sentence each, that says how to see it again.
    differences: list[str] = field(default_factory=list)

    def count(self, stats: EngineStats) -> None:
        """Adds what one engine has done."""
        self.generated_tokens += stats.generated_tokens
        self.steps += stats.steps
        self.preemptions_swapped += stats.preemptions_swapped
        self.preemptions_recomputed += stats.preemptions_recomputed
        self.recomputed_tokens += stats.recomputed_tokens
        self.prefix_hit_tokens += stats.prefix_cache_hits

    def add(self, other: "Tally") -> None:
        """Adds another one's counts."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def __str__(self) -> str:
        counts = [f"{getattr(self, f.name)} {f.name.replace('_', ' ')}" for f in fields(self)[:-1]]
        return ", ".join([*counts, f"{len(self.differences)} differences"])

    def assert_exact_and_thorough(self) -> None:
        """Nothing differs, and what is hard has been done."""
        assert not self.differences, "\n".join([f"{len(self.differences)} differences", *self.differences[:20]])
        for name in (
            "preemptions_swapped",
            "preemptions_recomputed",
            "recomputed_tokens",
            "prefix_hit_tokens",
            "cancellations",
            "aborts",
            "weight_updates",
            "straddling",
            "handoffs",
            "local_prefills",
        ):
            assert getattr(self, name) > 0, f"no {name.replace('_', ' ')} in {self}"
