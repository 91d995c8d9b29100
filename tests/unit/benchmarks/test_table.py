"""Samples as a table and as JSON."""

import json

from benchmarks.spread import Spread
from benchmarks.table import Quantity, Samples

RATE = Quantity("rate", "tok/s", higher_is_better=True)
TIME = Quantity("time", "ms", higher_is_better=False)


def samples() -> Samples:
    found = Samples()
    for value in (10.0, 20.0):
        found.add("slow", RATE, value)
        found.add("fast", RATE, 3 * value)
    found.add("slow", TIME, 8.0)
    found.add("fast", TIME, 2.0)
    found.add("fast", Quantity("extra", "", True), 5.0)
    return found


def test_above_one_is_faster_whichever_way_a_quantity_goes() -> None:
    assert list(samples().table("slow")) == [
        "| | slow | fast |",
        "|---|---|---|",
        "| rate, tok/s | 15 (10–20) | ×3 (3–3); 45 (30–60) |",
        "| time, ms | 8 (8–8) | ×4 (4–4); 2 (2–2) |",
        "| extra | – | 5 (5–5) |",
    ]


def test_more_conditions_than_quantities_become_rows_and_ratios_are_not_divided_again() -> None:
    found = Samples()
    for condition, factor in {"slow": 3.0, "fast": 1.5, "other": 2.0}.items():
        found.add(condition, Quantity("grown", "×", False), factor)
        found.add(condition, TIME, 6.0 / factor)
    assert list(found.table("slow"))[:4] == [
        "| | grown, × | time, ms |",
        "|---|---|---|",
        "| slow | 3 (3–3) | 2 (2–2) |",
        "| fast | 1.5 (1.5–1.5) | ×0.5 (0.5–0.5); 4 (4–4) |",
    ]


def test_a_plain_ratio_goes_the_way_of_the_values() -> None:
    assert samples().ratio("fast", "slow", "time") == Spread(0.25, 0.25, 0.25)
    assert samples().ratio("fast", "slow", "nothing") is None
    assert samples().ratio("fast", "nobody", "time") is None


def test_json_and_back() -> None:
    text = json.dumps(samples().to_json())
    assert Samples.from_json(json.loads(text)) == samples()
    assert json.loads(text)[0] == {
        "condition": "slow",
        "name": "rate",
        "unit": "tok/s",
        "higher_is_better": True,
        "values": [10.0, 20.0],
    }


def test_rounds_are_put_one_behind_the_other() -> None:
    both = samples()
    both.extend(samples())
    assert both.values("slow", "rate") == [10.0, 20.0, 10.0, 20.0]
