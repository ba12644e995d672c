"""The report's charts: colours, lines, axes and ticks."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from report_pages import ROOT

from jaxfp8rl.monitors.end.axes import SPAN, labels, power, ticks, value_axis
from jaxfp8rl.monitors.report.charts import HEIGHT, POINTS, WIDTH, Line, line_chart, stacked_chart
from jaxfp8rl.monitors.report.page import wilson

# --- colours


def themes() -> dict[str, dict[str, str]]:
    css = (ROOT / "jaxfp8rl" / "monitors" / "report" / "style.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", block))
                   for block in re.findall(r":root \{(.*?)\}", css, re.S))
    return {"light": light, "dark": dark}


def contrast(a: str, b: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) of relative luminances."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_enough_in_both_themes(theme):
    colours = themes()[theme]
    assert len(colours) == len(themes()["light"]) == 21
    lines, marks = [f"c{i}" for i in range(8)], [f"{s}{i}" for s in "pm" for i in (1, 2, 3)]
    pairs = [(ink, ground) for ink in ("ink", "soft", "link") for ground in ("paper", "panel")]
    pairs += [("ink", mark) for mark in marks] + [(line, "paper") for line in lines]
    assert {f"{a} on {b}": contrast(colours[a], colours[b]) for a, b in pairs
            if contrast(colours[a], colours[b]) < 4.5} == {}
    assert contrast(colours["focus"], colours["paper"]) >= 3


# --- plots

SERIES = st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 6)), min_size=1, max_size=900)


@given(SERIES, st.booleans())
@settings(deadline=None)
def test_a_line_stays_in_its_picture_and_keeps_its_extremes(ys, log):
    bounds = [y - 1 for y in ys], [y + 1 for y in ys]
    chart = line_chart("x", [Line("a", range(len(ys)), ys, *bounds)], log)
    points = re.findall(r'<path class="l0" d="M([^"]*)"', chart)
    if not points:
        assert log and max(ys) <= 0
        return
    assert 'class="b0"' in chart and "nan" not in chart
    places = [tuple(map(float, p.split())) for p in points[0].split("L")]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places) and len(places) <= POINTS + 2
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    shown = [y for y in ys if not log or y > 0]
    ends = [min(shown), max(shown)]
    exact = line_chart("x", [Line("a", [0, 1], ends, [y - 1 for y in ends], [y + 1 for y in ends])], log)
    expected = [float(p.split()[1]) for p in re.search(r'<path class="l0" d="M([^"]*)"', exact)[1].split("L")]
    assert [max(y for _, y in places), min(y for _, y in places)] == expected


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_enclose_what_they_are_for(low, span):
    found = ticks(low, low + span)
    step = found[1] - found[0]
    assert 2 <= len(found) <= 9
    assert found[0] <= low + 1e-6 * step + 1e-9 * abs(low) and found[
        -1] >= low + span - 1e-6 * step - 1e-9 * abs(low)


ANY = st.lists(st.floats(-1e300, 1e300) | st.floats(0.999999, 1.0)
               | st.sampled_from([0.0, math.nan, math.inf]), max_size=40)
NEAR = st.tuples(st.floats(-1e12, 1e12), st.lists(st.floats(-1e-6, 1e-6), min_size=1, max_size=30))
SHIFTED = NEAR.map(lambda p: [p[0] * (1 + d) for d in p[1]])  # a constant but for its last digits


@given(ANY | SHIFTED, st.booleans(), st.integers(0, 10**9))
@settings(deadline=None, max_examples=200)
def test_no_two_ticks_have_the_same_label_and_no_axis_makes_a_course_of_rounding(ys, log, first):
    chart = line_chart("x", [Line("a", range(first, first + len(ys)), ys)], log, "unit")
    texts = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(end|middle)">([^<]+)</text>', chart)
    up = [t for _, anchor, t in texts if anchor == "end" and t != "step"]
    along = [(float(x), t) for x, anchor, t in texts if anchor == "middle"]
    assert len(set(up)) == len(up) >= 2 and len({t for _, t in along}) == len(along) >= 1
    assert not any("." in t for _, t in along) and "nan" not in chart and "inf" not in chart
    widths = [7 * len(t) for _, t in along]
    assert all(b - a >= (v + w) / 2 for (a, _), (b, _), v, w in zip(along, along[1:], widths, widths[1:]))
    shown = [y for y in ys if math.isfinite(y) and (not log or y > 0)]
    places = [float(p.split()[1]) for p in "L".join(re.findall(r'class="l0" d="M([^"]*)"', chart)).split("L")
              if p]
    assert bool(places) == bool(shown)
    largest = max(map(abs, shown), default=0)
    if not log and shown and max(shown) - min(shown) < 1e-3 * largest:
        assert max(places) - min(places) <= HEIGHT * 1e-3 / SPAN


@given(SERIES, st.sampled_from([(None, None), (0, 1), (1, None)]))
@example(ys=[1e-5, -26667.0], bounds=(None, None))
def test_an_axis_encloses_its_values_and_ends_where_the_metric_does(ys, bounds):
    low, high = value_axis(ys, bounds)[0]
    slack = 1e-9 * (high - low)  # a millionth of a pixel
    assert low <= min(ys) + slack and high >= max(ys) - slack
    if bounds == (0, 1) and 0 <= min(ys) and max(ys) <= 1:
        assert low >= -1e-12 and high <= 1 + 1e-12


def test_ticks_by_hand():
    assert value_axis([0.9999986, 1.0], (0, 1))[0] == pytest.approx((0.95, 1.0))
    assert labels([0.95, 0.96, 0.97]) == ["0.95", "0.96", "0.97"]
    assert labels([1.0, 1.00001, 1.00002]) == ["1.00000e0", "1.00001e0", "1.00002e0"]
    assert labels([0, 5e6, 1e7]) == ["0", "5e6", "1e7"] and labels([0, 500, 1000]) == ["0", "500", "1,000"]
    assert labels([-0.5, 0.0, 0.5]) == ["-0.5", "0.0", "0.5"]
    assert [power(10.0**p) for p in (-5, -2, 0, 3, 7)] == ["1e-5", "0.01", "1", "1,000", "1e7"]


def test_axes_say_what_they_are_of(page):
    figures = re.findall(r"<figure>.*?</figure>", page.raw, re.S)
    assert all('class="unit"' in f and ">step</text>" in f for f in figures)
    units = set(re.findall(r'class="unit"[^>]*>([^<]+)<', page.raw))
    assert {"reward", "share of tokens", "nats", "factor", "GiB", "seconds"} <= units


def test_a_stack_adds_up_and_a_rare_long_step_does_not_flatten_it():
    steps = list(range(1, 51))
    lines = [Line(name, steps, [100.0] + [1.0] * 49, place=i) for i, name in enumerate("abc")]
    areas = re.findall(r'd="(M[^"]*Z)"', stacked_chart("x", lines))
    tops = [float(re.search(r"M[\d.]+ [\d.]+L[\d.]+ ([\d.]+)", area)[1]) for area in areas]
    heights = -np.diff([HEIGHT - 26, *tops])
    np.testing.assert_allclose(heights, heights[0], atol=0.2)
    assert heights[0] > 30  # a third of a usual step, and not of the longest


def test_wilson():
    """The interval's own definition: its ends are 1.96 standard errors, taken at themselves, from the share
    seen."""
    for share, n in ((0.0, 10), (0.3, 57), (1.0, 115)):
        for end in wilson(share, n):
            assert abs(share - end) == pytest.approx(1.96 * math.sqrt(max(0.0, end * (1 - end)) / n),
                                                     abs=1e-7)
