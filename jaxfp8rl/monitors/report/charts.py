"""Plots as inline SVG: no script, nothing fetched. Colours are CSS variables of the page, so that they follow its theme.

A picture that says something by colour says it by dash as well, has a `<title>` and a `<desc>` for who does not see it, and the
page puts a table of the same numbers beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 12, 26
POINTS = 300  # of a line at most: two a bucket, its least and its largest, so that no spike is lost
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4", "6 2 1 2")


class Line(NamedTuple):
    """y over x, one name. `low`, `high`: a band around it. `place`: which colour and dash."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    place: int = 0


def line_chart(title: str, lines: Sequence[Line], log: bool = False) -> Markup:
    """Lines over the same axes. Under `log` what is not positive is left out."""
    lines = [_thin(line, log) for line in lines]
    ys = [v for line in lines for v in (*line.y, *line.low, *line.high) if not log or v > 0]
    axes = _Axes([x for line in lines for x in line.x], ys, log)
    parts = [axes.frame()]
    parts += [_band(line, axes) for line in lines if line.low]
    parts += [_stroke(line, axes, marks=len(line.x) <= 24) for line in lines]
    return _svg(title, " ".join(_told(line) for line in lines), parts)


def stacked_chart(title: str, lines: Sequence[Line]) -> Markup:
    """Areas one on another, in order; all have the same x. A rare total above three times the usual one is cut off at the top."""
    lines = [line._replace(x=x, y=y) for line in lines for x, y in [_means(line.x, line.y)]]
    totals = [sum(column) for column in zip(*(line.y for line in lines))]
    usual = sorted(totals)[int(0.9 * (len(totals) - 1))]
    top = min(max(totals), 1.5 * usual) if max(totals) > 3 * usual else max(totals)
    axes = _Axes(lines[0].x, [0, top], False)
    parts, below = [axes.frame()], [0.0] * len(totals)
    for line in lines:
        above = [a + b for a, b in zip(below, line.y)]
        parts.append(_area(line.x, below, above, axes, f"a{line.place % 8}", line.name))
        below = above
    return _svg(title, " ".join(_told(line) for line in lines), parts)


def swatch(place: int, area: bool = False) -> Markup:
    """The sign of a line, or of an area, for a legend."""
    mark = f'<rect class="a{place % 8}" width="26" height="10"/>' if area else _path(f"l{place % 8}", "M0 5H26", place)
    return Markup(f'<svg class="swatch" viewBox="0 0 26 10" width="26" height="10" aria-hidden="true">{mark}</svg>')


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`: 1, 2 or 5 times a power of ten apart (Heckbert 1990)."""
    span = (high - low) / max(wanted - 1, 1)
    power = 10.0 ** math.floor(math.log10(span))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= 0.75 * span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(x: float) -> str:
    """At most four significant digits, thousands with a comma: 0.9913, 1.2e-07, 12,345."""
    if not math.isfinite(x):
        return str(x)
    if x and (abs(x) < 1e-3 or abs(x) >= 1e9):
        mantissa, exponent = f"{x:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


class _Axes:
    """From data to the picture's coordinates."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], log: bool):
        self.log = log
        x_low, x_high = min(xs, default=0), max(xs, default=1)
        self.x_ticks = [t for t in ticks(x_low, max(x_high, x_low + 1), 6) if x_low <= t <= max(x_high, x_low + 1)]
        self.x_range = x_low, max(x_high, x_low + 1)
        if log:
            low, high = math.floor(math.log10(min(ys, default=1))), math.ceil(math.log10(max(ys, default=1)))
            high = max(high, low + 1)
            self.y_ticks = [10.0**p for p in range(low, high + 1, math.ceil((high - low) / 6))]
            self.y_range = low, high
        else:
            low, high = min(ys, default=0), max(ys, default=1)
            room = 0.5 * (high - low) or 0.05 * max(abs(low), 1e-6)
            low = 0 if 0 <= low <= room else low  # a scale that nearly reaches 0 shows it
            self.y_ticks = ticks(low, high if high > low else low + room)
            self.y_range = self.y_ticks[0], self.y_ticks[-1]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """What lies beyond an end, as 0 does on a logarithmic scale, is drawn at that end."""
        low, high = self.y_range
        if self.log:
            value = math.log10(value) if value > 0 else low
        share = (value - low) / (high - low)
        return HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> str:
        return f"{self.x(x):.1f} {self.y(y):.1f}"

    def frame(self) -> str:
        """Grid, numbers, and the word "step"."""
        parts = []
        for t in self.y_ticks:
            y = self.y(t)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{self._y_label(t)}</text>')
        for t in self.x_ticks:
            parts.append(f'<text x="{self.x(t):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{number(t)}</text>')
        parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 14}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
        return "".join(parts)

    def _y_label(self, tick: float) -> str:
        """With the digits that tell one tick from the next."""
        step = 0 if self.log else self.y_ticks[1] - self.y_ticks[0]
        digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0
        return f"{tick:.{digits}f}" if 1 <= digits <= 5 and abs(tick) >= 10**-digits else number(tick)


def _svg(title: str, description: str, parts: Sequence[str]) -> Markup:
    """The words are the picture's own children, which needs no ids that could clash."""
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc><g aria-hidden=\"true\">{''.join(parts)}</g></svg>"
    )


def _told(line: Line) -> str:
    """The line in words."""
    if not line.y:
        return f"{line.name}: no values."
    name = f"{line.name}: " if line.name else ""
    return (
        f"{name}{number(line.y[0])} at step {number(line.x[0])}, {number(line.y[-1])} at step {number(line.x[-1])},"
        f" between {number(min(line.y))} and {number(max(line.y))}."
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


def _area(x: Sequence[float], low: Sequence[float], high: Sequence[float], axes: _Axes, style: str, name: str) -> str:
    there = [axes.point(a, b) for a, b in zip(x, high)]
    back = [axes.point(a, b) for a, b in zip(reversed(x), reversed(low))]
    title = f"<title>{escape(name)}</title>" if name else ""
    return f'<path class="{style}" d="M{"L".join(there + back)}Z">{title}</path>'


def _thin(line: Line, log: bool) -> Line:
    """At most POINTS points: of each bucket of steps the least and the largest, in their order."""
    kept = [i for i, y in enumerate(line.y) if not log or y > 0]
    if len(kept) > POINTS:
        size = math.ceil(2 * len(kept) / POINTS)
        buckets = [kept[i : i + size] for i in range(0, len(kept), size)]
        ends = [(min(b, key=line.y.__getitem__), max(b, key=line.y.__getitem__)) for b in buckets]
        kept = sorted({i for pair in ends for i in pair} | {kept[0], kept[-1]})
    fields = (line.x, line.y, line.low, line.high)
    return line._replace(**{n: [f[i] for i in kept] if f else () for n, f in zip(("x", "y", "low", "high"), fields)})


def _means(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """(x, y) by buckets of equal size, at most POINTS of them: a stack must add up at every place."""
    size = math.ceil(len(x) / POINTS)
    return list(x[::size]), [sum(y[i : i + size]) / len(y[i : i + size]) for i in range(0, len(y), size)]
