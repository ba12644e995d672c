"""Plots as inline SVG, without scripts or external files. Colours are CSS variables of the page, so that they
follow its theme.

Lines differ by dash as well as by colour. Each plot has a `<title>` and a `<desc>` for screen readers, and
the page puts a table of the same numbers beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from jaxfp8rl.monitors.end.axes import Bounds, labels, log_axis, power, step, ticks, value_axis

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 12, 26
CHARACTER = 6.7  # the width of a character at 12 pixels
POINTS = 300  # maximal points of a line: the smallest and largest of each bucket, so that no spike is lost
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 1 2")


class Line(NamedTuple):
    """A named line y over x. `low`, `high`: a band around it. `place`: the index of its colour and dash."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    place: int = 0


def line_chart(
    title: str, lines: Sequence[Line], log: bool = False, unit: str = "", bounds: Bounds = (None, None)
) -> Markup:
    """Lines over the same axes, without values that are not finite or, under `log`, not positive. `unit`: the
    unit of the values; `bounds`: their limits."""
    lines = [_thin(line, log) for line in lines]
    ys = [v for line in lines for v in (*line.y, *line.low, *line.high) if not log or v > 0]
    axes = _Axes([x for line in lines for x in line.x], ys, log, unit, bounds)
    parts = [axes.frame()]
    parts += [_band(line, axes) for line in lines if line.low]
    parts += [_stroke(line, axes, marks=len(line.x) <= 24) for line in lines]
    return _svg(title, " ".join(_told(line) for line in lines), parts)


def stacked_chart(title: str, lines: Sequence[Line], unit: str = "") -> Markup:
    """Stacked areas, in order; all have the same x. A total far above the usual ones is cut off at the
    top."""
    lines = [line._replace(x=x, y=y) for line in lines for x, y in [_means(line.x, line.y)]]
    totals = [sum(column) for column in zip(*(line.y for line in lines))]
    usual = sorted(totals)[int(0.9 * (len(totals) - 1))]
    top = min(max(totals), 1.5 * usual) if max(totals) > 3 * usual else max(totals)
    axes = _Axes(lines[0].x, [0, top], False, unit)
    parts, below = [axes.frame()], [0.0] * len(totals)
    for line in lines:
        above = [a + b for a, b in zip(below, line.y)]
        parts.append(_area(line.x, below, above, axes, f"a{line.place % 8}", line.name))
        below = above
    return _svg(title, " ".join(_told(line) for line in lines), parts)


def swatch(place: int, area: bool = False) -> Markup:
    """The symbol of a line, or of an area, for a legend."""
    mark = f'<rect class="a{place % 8}" width="26" height="10"/>' if area else _path(
        f"l{place % 8}", "M0 5H26", place)
    return Markup(
        f'<svg class="swatch" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">{mark}</svg>')


def number(x: float) -> str:
    """A number with at most four significant digits and commas for thousands: 0.9913, 1.2e-07, 12,345."""
    if not math.isfinite(x):
        return str(x)
    if x and (abs(x) < 1e-3 or abs(x) >= 1e9):
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


class _Axes:
    """Maps data to the coordinates of the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log: bool, unit: str = "",
                 bounds: Bounds = (None, None)):
        self.log, self.unit = log, unit
        self.y_range, self.y_ticks = log_axis(ys) if log else value_axis(ys, bounds)
        self.y_labels = [power(t) for t in self.y_ticks] if log else labels(self.y_ticks)
        self.left = max(LEFT, 26 + math.ceil(CHARACTER * max(map(len, self.y_labels))))
        self.x_range = min(xs, default=0), max(max(xs, default=1), min(xs, default=0) + 1)
        self.x_ticks = self._step_ticks()

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        """The coordinate of `value`. Values outside the axis, such as 0 on a logarithmic one, are drawn at
        its end."""
        low, high = self.y_range
        if self.log:
            value = math.log10(value) if value > 0 else low
        share = (value - low) / (high - low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def frame(self) -> str:
        """The grid, the tick labels, the word "step", and the unit of the y axis."""
        parts = []
        for t, label in zip(self.y_ticks, self.y_labels):
            y = self.y(t)
            parts.append(f'<path class="grid" d="M{self.left} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        for t, label in zip(self.x_ticks, map(step, self.x_ticks)):
            parts.append(f'<text x="{self.x(t):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
        parts.append(f'<path class="axis" d="M{self.left} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{self.left - 14}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
        middle = (HEIGHT - BOTTOM + TOP) / 2
        if self.unit:
            turned = f'transform="rotate(-90)" x="{-middle:.1f}" y="12" text-anchor="middle"'
            parts.append(f'<text class="unit" {turned}>{escape(self.unit)}</text>')
        return "".join(parts)

    def _step_ticks(self) -> list[float]:
        """Ticks at whole steps, as many as fit beside each other."""
        low, high = self.x_range
        for wanted in (6, 4, 3, 2):
            found = [t for t in ticks(low, high, wanted) if low <= t <= high and t == round(t)]
            if CHARACTER * sum(len(step(t)) + 3 for t in found) < WIDTH - self.left - RIGHT:
                return found
        return found[:1]


def _svg(title: str, description: str, parts: Sequence[str]) -> Markup:
    """The picture with title and description as children, which needs no ids that could clash."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        f"<g aria-hidden=\"true\">{''.join(parts)}</g></svg>"
    )


def _told(line: Line) -> str:
    """A description of the line in words."""
    if not line.y:
        return f"{line.name}: no values."
    name = f"{line.name}: " if line.name else ""
    return (
        f"{name}{number(line.y[0])} at step {number(line.x[0])}, "
        f"{number(line.y[-1])} at step {number(line.x[-1])}, "
        f"between {number(min(line.y))} and {number(max(line.y))}."
    )


def _stroke(line: Line, axes: _Axes, marks: bool) -> str:
    points = [axes.point(x, y) for x, y in zip(line.x, line.y)]
    drawn = _path(f"l{line.place % 8}", "M" + "L".join(points), line.place) if points else ""
    dots = "".join('<circle cx="{}" cy="{}" r="3"/>'.format(*p.split()) for p in points) if marks else ""
    return drawn + (f'<g class="d{line.place % 8}">{dots}</g>' if dots else "")


def _path(style: str, d: str, place: int) -> str:
    dash = f' stroke-dasharray="{DASHES[place % 8]}"' if DASHES[place % 8] else ""
    return f'<path class="{style}" d="{d}"{dash}/>'


def _band(line: Line, axes: _Axes) -> str:
    return _area(line.x, line.low, line.high, axes, f"b{line.place % 8}", "")


def _area(x: Sequence[float], low: Sequence[float], high: Sequence[float], axes: _Axes, style: str,
          name: str) -> str:
    there = [axes.point(a, b) for a, b in zip(x, high)]
    back = [axes.point(a, b) for a, b in zip(reversed(x), reversed(low))]
    title = f"<title>{escape(name)}</title>" if name else ""
    return f'<path class="{style}" d="M{"L".join(there + back)}Z">{title}</path>'


def _thin(line: Line, log: bool) -> Line:
    """The line with at most POINTS points: the smallest and largest of each bucket of steps, in order."""
    kept = [i for i, y in enumerate(line.y) if math.isfinite(y) and (not log or y > 0)]
    if len(kept) > POINTS:
        size = math.ceil(2 * len(kept) / POINTS)
        buckets = [kept[i : i + size] for i in range(0, len(kept), size)]
        ends = [(min(b, key=line.y.__getitem__), max(b, key=line.y.__getitem__)) for b in buckets]
        kept = sorted({i for pair in ends for i in pair} | {kept[0], kept[-1]})
    fields = (line.x, line.y, line.low, line.high)
    return line._replace(**{n: [f[i] for i in kept] if f else ()
                            for n, f in zip(("x", "y", "low", "high"), fields)})


def _means(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """(x, y) as means over at most POINTS buckets of equal size, so that a stack still adds up at every
    point."""
    size = math.ceil(len(x) / POINTS)
    return list(x[::size]), [sum(y[i : i + size]) / len(y[i : i + size]) for i in range(0, len(y), size)]
