"""Charts as SVG: bars of ratios with their range, and curves on logarithmic axes. Same data, same bytes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.spread import Spread, short

#: Distinguishable with every kind of colour vision (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, FAINT = "#222222", "#dddddd"


def svg(width: float, height: float, elements: Sequence[str]) -> str:
    """A picture on white, readable on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *elements, "</svg>"]) + "\n"


def _text(x: float, y: float, words: str, anchor: str = "start", **attributes: str) -> str:
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width:g}" fill="none"/>'


# --- bars


def bars(title: str, groups: Mapping[str, Mapping[str, Spread]]) -> str:
    """A group of horizontal bars per quantity, one bar per condition: ratios to what stands at 1."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    longest = max((each.high for group in groups.values() for each in group.values()), default=1.0)
    left, right, top, bar, gap = 170.0, 640.0, 62.0, 15.0, 14.0
    scale = (right - left) / (1.08 * max(longest, 1.0))
    elements = [_text(16, 22, title, font_weight="bold"), *_legend(names, 16, 42)]
    y = top
    for label, group in groups.items():
        elements.append(_text(left - 10, y + bar * len(group) / 2 + 4, label, "end"))
        for name, spread in group.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            elements += _bar(left, y, bar, scale, spread, colour)
            y += bar
        y += gap
    one = left + scale
    elements.append(_line(one, top - 8, one, y - gap + 6, INK))
    elements.append(_text(one, y - gap + 20, "1", "middle"))
    return svg(720, y + 16, elements)


def _bar(left: float, y: float, height: float, scale: float, spread: Spread, colour: str) -> Iterator[str]:
    width = scale * spread.median
    yield f'<rect x="{left:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{height - 2:.1f}" fill="{colour}"/>'
    yield _line(left + scale * spread.low, y + height / 2, left + scale * spread.high, y + height / 2, INK, 1.5)
    yield _text(left + scale * spread.high + 6, y + height - 3, f"×{spread.median:.2f}", font_size="11")


# --- curves


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y), all positive; a bound is drawn dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes, both logarithmic."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]


_PANEL_WIDTH, _PANEL_HEIGHT = 400.0, 310.0


def panels(shown: Sequence[Panel]) -> str:
    """Two panels per row."""
    elements: list[str] = []
    for number, panel in enumerate(shown):
        row, column = divmod(number, 2)
        elements.append(f'<g transform="translate({column * _PANEL_WIDTH:g} {row * _PANEL_HEIGHT:g})">')
        elements += _panel(panel)
        elements.append("</g>")
    num_columns, num_rows = min(len(shown), 2), math.ceil(len(shown) / 2)
    return svg(num_columns * _PANEL_WIDTH, num_rows * _PANEL_HEIGHT, elements)


def _panel(panel: Panel) -> Iterator[str]:
    xs = [x for curve in panel.curves for x, _ in curve.points]
    ys = [y for curve in panel.curves for _, y in curve.points]
    x_axis = LogAxis.around(xs, 62, _PANEL_WIDTH - 16)
    y_axis = LogAxis.around(ys, _PANEL_HEIGHT - 46, 64)
    yield _text(16, 20, panel.title, font_weight="bold")
    yield from _legend([curve.name for curve in panel.curves], 16, 38, [curve.is_bound for curve in panel.curves])
    for value in x_axis.ticks(sorted(set(xs))):
        yield _line(x_axis.at(value), y_axis.start, x_axis.at(value), y_axis.end, FAINT)
        yield _text(x_axis.at(value), y_axis.start + 15, short(value), "middle", font_size="10")
    for value in y_axis.decades():
        yield _line(x_axis.start, y_axis.at(value), x_axis.end, y_axis.at(value), FAINT)
        yield _text(x_axis.start - 5, y_axis.at(value) + 4, f"{value:g}", "end", font_size="10")
    for number, curve in enumerate(panel.curves):
        yield _curve(curve, COLOURS[number % len(COLOURS)], x_axis, y_axis)
    yield _text((x_axis.start + x_axis.end) / 2, _PANEL_HEIGHT - 10, panel.x_label, "middle", font_size="11")
    yield _text(12, y_axis.end - 8, panel.y_label, font_size="11")


def _curve(curve: Curve, colour: str, x_axis: "LogAxis", y_axis: "LogAxis") -> str:
    path = "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in curve.points)
    style = 'stroke-dasharray="5 4"' if curve.is_bound else 'stroke-width="2"'
    return f'<path d="M{path}" stroke="{colour}" fill="none" {style}/>'


@dataclass(frozen=True, slots=True)
class LogAxis:
    """Values between `low` and `high` on the way from `start` to `end`, which are places in the picture."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> "LogAxis":
        """With room on both sides of positive values, at least one."""
        return cls(min(values) / 1.15, max(values) * 1.15, start, end)

    def at(self, value: float) -> float:
        """Its place."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, values: Sequence[float], room: float = 34.0) -> list[float]:
        """Those of ascending values whose labels do not touch."""
        shown: list[float] = []
        for value in values:
            if not shown or abs(self.at(value) - self.at(shown[-1])) >= room:
                shown.append(value)
        return shown

    def decades(self) -> list[float]:
        """1, 2 and 5 times the powers of ten that are in range."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        every = [m * 10.0**power for power in range(first, last + 1) for m in (1, 2, 5)]
        within = [value for value in every if self.low <= value <= self.high]
        return within if len(within) <= 8 else [value for value in within if f"{value:e}".startswith("1.0")]


def _legend(names: Sequence[str], x: float, y: float, dashed: Sequence[bool] = ()) -> Iterator[str]:
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        dash = ' stroke-dasharray="4 3"' if number < len(dashed) and dashed[number] else ""
        yield f'<path d="M{x:.1f} {y - 4:.1f}h18" stroke="{colour}" stroke-width="4"{dash}/>'
        yield _text(x + 23, y, name, font_size="11")
        x += 36 + 6.2 * len(name)
