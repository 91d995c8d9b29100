"""Medians, ranges and ratios of values measured in turns."""

import pytest

from benchmarks.spread import Spread, ratio, short


def test_median_and_range() -> None:
    assert Spread.of([4.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=4.0)


def test_a_ratio_is_of_values_measured_in_turns_and_not_of_medians() -> None:
    """A machine that is ten times as slow in one round leaves the ratio alone."""
    assert ratio([1.0, 20.0, 3.0], [2.0, 40.0, 4.0]) == Spread(0.5, 0.5, 0.75)


def test_a_value_without_its_baseline_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("value", "text"), [(1234.4, "1234"), (99.96, "100"), (0.12345, "0.123"), (7, "7")])
def test_three_digits(value: float, text: str) -> None:
    assert short(value) == text
