"""The report: what a run wrote is there and escaped, the page stands alone and reads without colours, its
tests are exact."""

from __future__ import annotations

import ast
import html
import html.parser
import itertools
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxfp8rl.cli.main import main
from jaxfp8rl.data.packing import Sample, pack, unpack
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.monitors.end.axes import SPAN, labels, power, ticks, value_axis
from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.monitors.report import compare, write_report
from jaxfp8rl.monitors.report.charts import HEIGHT, POINTS, WIDTH, Line, line_chart, stacked_chart
from jaxfp8rl.monitors.report.completions import SHOWN, pick, prepared
from jaxfp8rl.monitors.report.page import in_rows, wilson
from jaxfp8rl.monitors.report.runs import events, load_runs
from jaxfp8rl.monitors.report.sections import SECTIONS
from jaxfp8rl.rollout.samples import token_lengths
from jaxfp8rl.run.provenance import commit, hardware, versions, write_about

ROOT = Path(__file__).parents[3]
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\"'{{ 7 * 7 }}"
VOID = {"meta", "link", "img", "br"}


def a_run(path: Path, steps: int = 12, seed: int = 0, lr: float = 1e-3, shift: float = 0.0, **row) -> Path:
    """A run directory as training writes it, with a completion that tries to break the page."""
    rng = np.random.default_rng(seed)
    metrics, samples = (JsonlMonitor(path / f"{name}.jsonl") for name in ("metrics", "samples"))
    metrics.log({"step": 0, "eval/reward_mean": 0.1, "eval/problems": 100})
    for step in range(1, steps + 1):
        keys = [m.key for s in SECTIONS for m in s.metrics if m.key != "eval/reward_mean"]
        keys += [f"time/{p}_s" for p in ("rollout", "reward", "score", "update", "publish")]
        record = {"step": step, **dict(zip(keys, rng.random(len(keys)))), "reward/std": 0.5,
                  "time/step_s": 6.0}
        record["reward/mean"] += shift
        metrics.log(record
                    | ({"eval/reward_mean": 0.5 + shift, "eval/problems": 100} if step == steps else {}))
        text = HOSTILE + "x" * 8
        n = len(text) + 1
        mu = -rng.random(n)
        samples.log({
            "step": step, "id": HOSTILE, "prompt": HOSTILE, "completion": text, "answer": "17", "reward": 1.0,
            "tokens": n,
            "finish_reason": "stop", "token_lengths": [1] * (n - 1) + [0], "rollout_logp": mu,
            "old_logp": mu + rng.choice([0, 0.02, -0.2, 0.9], n), "weights": rng.choice([1.0, 0.0], n), **row,
        })
    config = f'[run]\ndir = "{path.name}"\nseed = {seed}\n[rollout]\nprompts_per_step = 8\nsamples_per_prompt = 4\n'
    (path
     / "config.toml").write_text(f"{config}[optim]\nlr = {lr}\n[task]\nsystem_prompt = '''{HOSTILE}'''\n")
    (path / "notes.txt").write_text(HOSTILE + "\n")
    passed = {"estimate": 0.75, "low": 0.5, "high": 0.875, "method": "wilson"}
    asked = {"step": steps, "problems": 100, "samples": 4, "pass_at_k": {"4": passed}}
    other = asked | {"step": 0, "greedy": True, "threshold": 0.5, "overrides": {"rollout.top_k": 7}}
    # a0's is of an older version
    (path / "eval.json").write_text(json.dumps(asked if path.name == "a0" else [asked, other]))
    return path


class Page(html.parser.HTMLParser):
    """Balanced tags or AssertionError; what it holds, by kind."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.tags, self.text, self.raw = [], [], [], path.read_text(encoding="utf-8")
        self.feed(self.raw)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two settings over three seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, (name, lr) in itertools.product(range(3), (("a", 1e-3), ("b", 2e-3))):
        a_run(folder / f"{name}{seed}", seed=seed, lr=lr, shift=100 * (lr - 1e-3))
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return Page(write_report([folder / "a0"]))


@pytest.fixture(scope="module")
def comparison(folder) -> Page:
    return Page(write_report(sorted(folder.glob("??"))))


@pytest.fixture(params=["page", "comparison"])
def either(request) -> Page:
    return request.getfixturevalue(request.param)


# --- the page


def test_what_a_run_wrote_is_text_and_nothing_else(either):
    """Neither a tag nor an attribute of the page comes from a completion, a prompt, a setting or a note."""
    assert not {"script", "img", "iframe", "object", "form"} & {tag for tag, _ in either.tags}
    assert not [key for _, attrs in either.tags for key in attrs if key.startswith("on")]
    assert "{{ 7 * 7 }}" in "".join(either.text) and "49" not in re.findall(r"\b49\b.{0,3}&#39;", either.raw)
    assert HOSTILE in "".join(either.text)  # the whole of it, in one place at least


def test_it_stands_alone(either):
    """Nothing is fetched: every address is a place in the page, and the browser is told to refuse the
    rest."""
    addresses = [attrs[k] for _, attrs in either.tags for k in ("src", "href", "data", "action")
                 if k in attrs]
    assert all(a == "data:," or a.startswith("#") for a in addresses)
    ids = [attrs["id"] for _, attrs in either.tags if "id" in attrs]
    assert len(set(ids)) == len(ids) and {a[1:] for a in addresses if a.startswith("#")} <= set(ids)
    assert "url(" not in either.raw and "@import" not in either.raw
    policy = next(m["content"] for m in either.all("meta")
                  if m.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "script" not in policy


def test_every_plot_can_be_read_without_seeing_it(either):
    charts = re.findall(r'<svg class="chart".*?</svg>', either.raw, re.S)
    figures = re.findall(r"<figure>.*?</figure>", either.raw, re.S)
    assert len(charts) == len(figures) >= 15
    for chart, figure in zip(charts, figures):
        assert re.match(r'<svg [^>]*role="img" aria-label="[^"]+"><title>[^<]+</title><desc>[^<]+</desc>',
                        chart)
        assert figure.count("<tr>") >= 3 and 'scope="col"' in figure and "<caption>" in figure
    regions = [a for _, a in either.tags if a.get("role") == "region"]
    # what scrolls can be scrolled by keys
    assert all(a.get("aria-label") and a.get("tabindex") == "0" for a in regions)
    assert len({a["aria-label"] for a in regions}) == len(regions)


def test_it_has_a_language_a_title_and_an_order_of_headings(either):
    assert either.all("html") == [{"lang": "en"}] and re.search(
        r"<title>[^<]+ - jaxfp8rl</title>", either.raw)
    # the first stop of the keyboard skips the links
    assert next(t for t, a in either.tags if a.get("href") == "#main") == "a"
    levels = [int(tag[1]) for tag, _ in either.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1


def test_a_completion_keeps_every_character(tmp_path):
    """Line breaks above all, which HTML and a template engine like to drop."""
    text = "\n\nfirst\n  second\t\n\n<b>\n"
    n = len(text)
    row = {"tokens": n, "completion": text, "token_lengths": [1] * n, "rollout_logp": [-1.0] * n,
           "weights": [1.0] * n}
    raw = Page(write_report([a_run(tmp_path / "run", 1, **row, old_logp=([-1.0, -0.5] * n)[:n])])).raw
    shown = re.search(r'<pre class="completion">\n(.*?)</pre>', raw, re.S)[1]
    assert "<mark" in shown and html.unescape(re.sub(r"<[^>]*>", "", shown)) == text


def test_every_metric_is_plotted_or_said_to_be_constant(page):
    text = "".join(page.text)
    for section in SECTIONS:
        assert section.title in text
        assert all(metric.title in text for metric in section.metrics)


def test_the_header_says_how_the_run_was_made(tmp_path):
    """What a start has recorded; without a record what the config tells."""
    run = a_run(tmp_path / "run", steps=2)
    start = {"model": "Qwen3-8B, 8.2 B parameters", "engine": "vllm 0.25.1", "hardware": "8 x H200",
             "commit": "abc1234", "command": "jaxfp8rl train demo", "date": "2026-01",
             "versions": {"jax": "0.11.2"}}
    for _ in range(2):
        write_about(run, start)
    header = Page(write_report([run])).raw.partition("</header>")[0]
    assert all(html.escape(v) in header for v in start.values()
               if isinstance(v, str)) and "jax 0.11.2" in header
    assert "resumed 1 time(s)" in header
    (run / "run.json").unlink()
    (run / "config.toml").write_text('[precision]\nrecipe = "fp8_unified"\n[rollout]\nengine = "vllm"\n')
    header = Page(write_report([run])).raw.partition("</header>")[0]
    assert "fp8_unified" in header and "vllm" in header


def test_hardware_and_commit_are_this_machines():
    assert re.fullmatch(r".+, \d+ cores|\d+ x .+", hardware())
    assert re.fullmatch(r"none|[0-9a-f]{7,}( \+ changes)?", commit())
    assert versions()["jax"] == jax.__version__


@pytest.mark.parametrize("count", range(12))
def test_no_row_of_charts_is_half_empty(count):
    sizes = [len(row) for row in in_rows(list(range(count)))]
    assert sum(sizes) == count and all(1 <= s <= 3 for s in sizes)
    assert count == 1 or not sizes or (max(sizes) - min(sizes) <= 1 and min(sizes) >= 2)


def test_a_page_stays_small(tmp_path):
    """A long run of long completions, all of whose tokens differ."""
    n = 1024
    rows = {"tokens": n, "completion": "word " * n, "token_lengths": [5] * n, "rollout_logp": [-1.0] * n,
            "old_logp": [-2.0] * n}
    runs = [a_run(tmp_path / f"{i}", 50, i, **rows, weights=[1.0] * n) for i in range(3)]
    for run in runs:
        monitor = JsonlMonitor(run / "metrics.jsonl")
        for step in range(51, 1500):
            monitor.log({"step": step, "entropy": step % 7, "grad_norm": 1 + step % 5, "loss": step % 3,
                         "time/step_s": 1.0})
    assert 1e5 < write_report(runs[:1]).stat().st_size < 1e6
    assert write_report(runs).stat().st_size < 1.5e6


@pytest.mark.parametrize("record", [{}, {"reward/mean": math.nan},
                                    {"loss": math.inf, "time/step_s": 0.0, "entropy": 1.0}])
def test_a_run_that_has_hardly_begun(tmp_path, record):
    """One line, no samples, no config."""
    JsonlMonitor(tmp_path / "metrics.jsonl").log({"step": 0, **record})
    Page(write_report([tmp_path]))


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


# --- the comparison


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=9))
@settings(deadline=None)
def test_sign_flip_is_the_count_of_all_patterns(d):
    seen = abs(sum(d)) * (1 - 1e-12)
    patterns = [abs(sum(s * x for s, x in zip(signs, d)))
                for signs in itertools.product((1, -1), repeat=len(d))]
    assert compare.sign_flip_p(d) == pytest.approx(np.mean([p >= seen - 1e-12 for p in patterns]), abs=2e-2)
    assert compare.sign_flip_p([-x for x in d]) == compare.sign_flip_p(d)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_sign_flip_is_exact(alpha):
    """Of all sign patterns of given magnitudes, those with p <= alpha are at most the share alpha, and hardly
    less."""
    sizes = np.array([0.3, 1.1, 0.7, 2.0, 0.2, 0.9, 1.6])
    ps = [compare.sign_flip_p(sizes * signs) for signs in itertools.product((1, -1), repeat=len(sizes))]
    assert alpha - 2 / len(ps) <= np.mean(np.array(ps) <= alpha) <= alpha


def test_sign_flip_of_many_pairs_is_near_the_normal_approximation():
    d = np.random.default_rng(1).normal(0.3, 1, 40)
    z = abs(d.sum()) / math.sqrt((d**2).sum())
    assert compare.sign_flip_p(d) == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.01)
    # the pattern seen is one of those drawn: never 0
    assert compare.sign_flip_p([1.0] * 40) == 2**-compare.EXACT_PAIRS


def test_runs_that_differ_in_seed_alone_are_one_variant(folder):
    runs = load_runs(sorted(folder.glob("??")))
    groups = compare.variants(runs)
    assert [(g.name, [r.name for r in g.runs]) for g in groups] == [
        ("lr 0.001", ["a0", "a1", "a2"]), ("lr 0.002", ["b0", "b1", "b2"]),
    ]
    assert set(compare.config_differences(runs)) == {"run.dir", "run.seed", "optim.lr"}
    (test,) = compare.paired_tests(groups, [("eval/reward_mean", "held-out")])
    assert test.seeds == (0, 1, 2) and test.p == 0.25 == test.smallest_p
    assert test.difference == pytest.approx(0.1) and test.means == pytest.approx((0.5, 0.6))


def test_the_comparison_says_all_of_it(comparison):
    text = "".join(comparison.text)
    assert "0.25 (at least 0.25)" in text and "optim.lr" in text and "lr 0.002" in text
    assert text.count("pass@4") == 11 and "0.5 to 0.875" in text
    assert text.count("100 problems, 4 completions each, greedy, passed from 0.5, rollout.top_k = 7") == 5
    assert "Band: the range of the seeds." in text


def test_runs_are_compared_as_far_as_all_have_come_and_a_seed_given_twice_counts_once(tmp_path):
    """Both learn alike, step/100, but one seed of the second variant is its second run's and 0.2 better."""
    for name, lr, seed, steps, more in (("a0", 1, 0, 100, 0), ("a1", 1, 1, 100, 0), ("b0", 2, 0, 40, 0),
                                        ("b1", 2, 1, 60, 0),
                                        ("b1 again", 2, 1, 60, 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(f"[run]\nseed = {seed}\n[optim]\nlr = {lr}\n")
        monitor = JsonlMonitor(tmp_path / name / "metrics.jsonl")
        for step in range(0, steps + 1, 20):
            monitor.log({"step": step, "eval/reward_mean": step / 100 + more})
    runs = load_runs([tmp_path / n for n in ("a0", "a1", "b0", "b1", "b1 again")])
    (test,) = compare.paired_tests(compare.variants(runs), [("eval/reward_mean", "held-out")])
    assert test.measure == "held-out, up to step 40" and test.seeds == (0, 1)
    assert test.means == pytest.approx((0.4, 0.45)) and (test.least, test.largest) == pytest.approx((0, 0.1))


def test_one_pair_is_no_test(folder):
    groups = compare.variants(load_runs([folder / "a0", folder / "b0"]))
    assert [t.p for t in compare.paired_tests(groups, [("reward/mean", "reward")])] == [None]
    assert compare.paired_tests(compare.variants(load_runs([folder / "a0", folder / "b1"])),
                                [("reward/mean", "reward")]) == []


# --- what it reads


def test_events_are_found(tmp_path):
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    monitor.log({"step": 1, "update/applied": 1.0, "loss": 0.1, "rollout/groups_rejected": 0,
                 "reward/undefined": 0})
    monitor.log({"step": 2, "update/applied": 0.5, "loss": math.nan, "rollout/groups_rejected": 2,
                 "reward/undefined": 1})
    monitor.log({"step": 3, "eval/undefined": 4})
    (run,) = load_runs([tmp_path])
    assert [step for step, _ in events(run)] == [2, 2, 2, 2, 3]
    assert {"2 groups", "1 comple", "4 held-o"} <= {what[:8] for _, what in events(run)}


def test_the_worst_token_of_the_run_is_shown(tmp_path):
    same = {"prompt": [{"role": "user", "content": "hi"}], "completion": "abc", "token_lengths": [1, 1, 1]}
    said = {"rollout_logp": [-1.0] * 3, "old_logp": [-1.0, -1.0, "nan"], "weights": [1, 0, 1]}
    rows = [same | said | {"step": i} for i in range(100)]
    rows[37] = rows[37] | {"old_logp": [-1.0, -4.0, -1.0]}
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    picked, count = pick(path)
    found = {c.row["step"]: c for c in prepared(picked)}
    assert {0, 37, 99} <= found.keys() and count == 100 and len(found) == SHOWN + 1
    first, left_out, broken = found[0].tokens
    assert (first.level, left_out.out, broken.level) == (0, True, 3) and "weight 0" in left_out.about
    assert found[0].prompt == "user: hi" and found[37].worst[0].text == "b"


NO_ESTIMATE = '{"step": 1, "problems": 1, "samples": 1, "pass_at_k": {"1": 2}}'
BROKEN = [  # (file, what is put there, what is said of the place)
    ("run.json", "{}", ": it is no list"),
    ("eval.json", "{", ""), ("eval.json", "[1]", ": record 1 is not"),
    ("eval.json", '{"a": 1}', ": record 1 is not"),
    ("eval.json", NO_ESTIMATE, ": record 1 is not"), ("samples.jsonl", "no\n", ""),
    ("config.toml", "a = = 1\n", ""),
    ("metrics.jsonl", '{"step": 1\n', ": line 1: "),
    ("metrics.jsonl", '{"step": 0}\n{"step": "x"}\n', ": line 2 is no record"),
    ("metrics.jsonl", '{"step": 0}\n[1]\n', ": line 2 is no record"),
]


@pytest.mark.parametrize("name,content,place", BROKEN)
def test_what_cannot_be_read_is_an_error_with_its_place(tmp_path, name, content, place, capsys):
    path = a_run(tmp_path / "run", steps=1)
    (path / name).write_text(content)
    assert main(["report", str(path)]) == 2
    assert f"{path / name}{place}" in capsys.readouterr().err and not (path / "report.html").exists()


def test_a_folder_without_a_run_and_one_given_twice(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2 and "no metrics" in capsys.readouterr().err
    path = str(a_run(tmp_path / "run", steps=1))
    assert main(["report", path, path]) == 2 and "given twice" in capsys.readouterr().err


def test_training_does_not_import_it():
    for file in (ROOT / "jaxfp8rl").rglob("*.py"):
        if file.parent.name != "cli" and file.parent.name != "report":
            imported = [getattr(n, "module", None) or "" for n in ast.walk(ast.parse(file.read_text()))]
            assert not [m for m in imported if m.startswith("jaxfp8rl.monitors.report")], file


# --- what the loop keeps of a token


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@settings(deadline=None)
def test_characters_of_tokens_that_are_single_bytes(text):
    """A tokenizer whose tokens are bytes cuts most characters of the world."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}
                                                         | {"<end>": 256}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {}, [256], 256)
    ids = tokenizer.encode(text)
    lengths = token_lengths(tokenizer, [*ids, 256], text)
    assert len(lengths) == len(ids) + 1 and min(lengths) >= 0 and sum(lengths) == len(text)
    if text.isascii():
        assert lengths == [1] * len(text) + [0]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=12), st.integers(0, 99))
@settings(deadline=None)
def test_unpack_finds_what_pack_laid_out(lengths, seed):
    rng = np.random.default_rng(seed)
    samples = [Sample(rng.integers(1, 9, p), rng.integers(1, 9, c), rng.random(c).astype(np.float32), 0.0)
               for p, c in lengths]
    batch = pack(samples, 12, 4, 3)
    for sample, logp, tokens in zip(samples, unpack(batch.rollout_logp, samples),
                                    unpack(batch.tokens, samples)):
        np.testing.assert_array_equal(logp, sample.logprobs)
        np.testing.assert_array_equal(tokens, sample.completion)


def test_rows_of_samples_are_json(tmp_path):
    path = a_run(tmp_path / "run", steps=1)
    (row,) = map(json.loads, (path / "samples.jsonl").read_text().splitlines())
    assert len(row["rollout_logp"]) == row["tokens"]
