"""Pictures are well-formed, complete, and true to scale."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks.chart import Curve, LogAxis, Panel, bars, panels
from benchmarks.spread import Spread

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_bar_twice_as_long_for_twice_as_fast() -> None:
    picture = bars("Speed", {"TTFT <512>": {"ours": Spread(2.0, 1.5, 2.5), "theirs": Spread(1.0, 1.0, 1.0)}})
    rects = [r for r in ElementTree.fromstring(picture).iter(f"{SVG}rect") if r.get("fill", "").startswith("#")]
    first, second = (float(rect.get("width", "0")) for rect in rects)
    assert first == pytest.approx(2 * second, rel=0.01)
    assert {"Speed", "TTFT <512>", "ours", "theirs", "×2.00", "×1.00"} <= set(texts(picture))


def test_a_logarithmic_axis() -> None:
    axis = LogAxis(1.0, 100.0, 0.0, 200.0)
    assert [axis.at(value) for value in (1, 10, 100)] == pytest.approx([0, 100, 200])
    assert axis.decades() == [1, 2, 5, 10, 20, 50, 100]
    assert axis.ticks([1, 1.1, 10, 11, 100]) == [1, 10, 100]


def test_bounds_are_dashed() -> None:
    points = [(1.0, 2.0), (10.0, 4.0)]
    panel = Panel("Step", "sequences", "ms", [Curve("measured", points), Curve("bound", points, is_bound=True)])
    picture = panels([panel, panel, panel])
    assert texts(picture).count("Step") == 3
    curves = re.findall(r'<path d="M[^"]*L[^"]*" stroke="#[0-9A-F]{6}" fill="none"[^>]*>', picture)
    assert [("dasharray" in curve) for curve in curves] == [False, True] * 3


def test_the_same_data_gives_the_same_bytes() -> None:
    groups = {"a": {"b": Spread(1.5, 1.0, 2.0)}}
    assert bars("t", groups) == bars("t", groups)
