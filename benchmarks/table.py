"""Samples of the same quantities under several conditions, as a Markdown table of medians with ratios."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is measured. `higher_is_better` decides which way a ratio is written: above 1 always means faster."""

    name: str
    unit: str
    higher_is_better: bool


@dataclass(slots=True)
class Samples:
    """Values by condition and quantity."""

    _values: dict[str, dict[Quantity, list[float]]] = field(default_factory=dict)

    def add(self, condition: str, quantity: Quantity, value: float) -> None:
        self._values.setdefault(condition, {}).setdefault(quantity, []).append(value)

    def speed_ratio(self, condition: str, baseline: str, quantity: Quantity) -> float:
        """How many times as fast `condition` is as `baseline`: the median over values that were measured in turns."""
        pairs = zip(self._values[condition][quantity], self._values[baseline][quantity], strict=True)
        ratio = statistics.median(value / base for value, base in pairs)
        return ratio if quantity.higher_is_better else 1 / ratio

    def table(self, baseline: str) -> Iterator[str]:
        """Lines of Markdown: a row per condition; median (lowest–highest), and how many times as fast as `baseline`."""
        quantities = list(self._values[baseline])
        yield "| | " + " | ".join(f"{q.name}, {q.unit}" for q in quantities) + " |"
        yield "|---" * (len(quantities) + 1) + "|"
        for condition in self._values:
            yield f"| {condition} | " + " | ".join(self._cell(condition, baseline, q) for q in quantities) + " |"

    def _cell(self, condition: str, baseline: str, quantity: Quantity) -> str:
        values = self._values[condition][quantity]
        cell = f"{_short(statistics.median(values))} ({_short(min(values))}–{_short(max(values))})"
        if condition == baseline:
            return cell
        return f"{cell} ×{self.speed_ratio(condition, baseline, quantity):.2f}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
