"""Samples of the same quantities under several conditions, as a Markdown table of medians with ratios, and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from benchmarks.spread import Spread, ratio


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is measured. `higher_is_better` decides which way a ratio is written: above 1 always means faster."""

    name: str
    unit: str
    higher_is_better: bool


class Series(TypedDict):
    """The JSON form of one condition's values of one quantity."""

    condition: str
    name: str
    unit: str
    higher_is_better: bool
    values: list[float]


@dataclass(slots=True)
class Samples:
    """Values by condition and quantity; those of the same place in two lists were measured in turns."""

    _values: dict[str, dict[Quantity, list[float]]] = field(default_factory=dict)

    def add(self, condition: str, quantity: Quantity, value: float) -> None:
        self._values.setdefault(condition, {}).setdefault(quantity, []).append(value)

    def extend(self, other: "Samples") -> None:
        """Appends all values of `other`."""
        for condition, quantity, value in other.each():
            self.add(condition, quantity, value)

    def each(self) -> Iterator[tuple[str, Quantity, float]]:
        """Every value with its condition and quantity."""
        for condition, by_quantity in self._values.items():
            for quantity, values in by_quantity.items():
                yield from ((condition, quantity, value) for value in values)

    @property
    def conditions(self) -> list[str]:
        return list(self._values)

    def quantities(self, condition: str) -> list[Quantity]:
        """What was measured under a condition; nothing under one that is unknown."""
        return list(self._values.get(condition, {}))

    def values(self, condition: str, name: str) -> Sequence[float]:
        """All values of the quantity of that name; none if it was not measured."""
        found = self._values.get(condition, {})
        return next((values for quantity, values in found.items() if quantity.name == name), ())

    def spread(self, condition: str, name: str) -> Spread | None:
        """None if it was not measured."""
        values = self.values(condition, name)
        return Spread.of(values) if values else None

    def ratio(self, condition: str, baseline: str, name: str) -> Spread | None:
        """Of the values to the baseline's, whichever way is better; None if one of the two was not measured."""
        values, baselines = self.values(condition, name), self.values(baseline, name)
        return ratio(values, baselines) if values and baselines else None

    def speed_ratio(self, condition: str, baseline: str, quantity: Quantity) -> Spread:
        """How many times as fast `condition` is as `baseline`, over values that were measured in turns."""
        values, baselines = self._values[condition][quantity], self._values[baseline][quantity]
        return ratio(values, baselines) if quantity.higher_is_better else ratio(baselines, values)

    def table(self, baseline: str) -> Iterator[str]:
        """Lines of Markdown; in each cell how many times as fast as `baseline` a condition is, and the values.

        Both as median (lowest–highest). What is a ratio already ("×") stands alone. A row per condition or per
        quantity, whichever are more.
        """
        quantities = list(dict.fromkeys(quantity for values in self._values.values() for quantity in values))
        if len(quantities) > len(self._values):
            rows = [[_heading(q), *(self._cell(name, baseline, q) for name in self._values)] for q in quantities]
            yield from _lines(["", *self._values], rows)
        else:
            rows = [[name, *(self._cell(name, baseline, q) for q in quantities)] for name in self._values]
            yield from _lines(["", *(_heading(quantity) for quantity in quantities)], rows)

    def _cell(self, condition: str, baseline: str, quantity: Quantity) -> str:
        values = self._values[condition].get(quantity)
        if not values:
            return "–"
        is_ratio = quantity.unit == "×"
        if is_ratio or condition == baseline or not self._values.get(baseline, {}).get(quantity):
            return str(Spread.of(values))
        return f"×{self.speed_ratio(condition, baseline, quantity)}; {Spread.of(values)}"

    def to_json(self) -> list[Series]:
        return [
            _series(condition, quantity, values)
            for condition, by_quantity in self._values.items()
            for quantity, values in by_quantity.items()
        ]

    @classmethod
    def from_json(cls, rows: Sequence[Series]) -> "Samples":
        """What `to_json` gave."""
        samples = cls()
        for row in rows:
            for value in row["values"]:
                samples.add(row["condition"], Quantity(row["name"], row["unit"], row["higher_is_better"]), value)
        return samples


def _lines(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield ("| " + " | ".join(head) + " |").replace("|  |", "| |")
    yield "|---" * len(head) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def _heading(quantity: Quantity) -> str:
    return f"{quantity.name}, {quantity.unit}" if quantity.unit else quantity.name


def _series(condition: str, quantity: Quantity, values: list[float]) -> Series:
    return {
        "condition": condition,
        "name": quantity.name,
        "unit": quantity.unit,
        "higher_is_better": quantity.higher_is_better,
        "values": values,
    }
