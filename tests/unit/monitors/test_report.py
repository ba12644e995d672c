"""The report: what a run wrote is there and escaped, the page stands alone and reads without colours, its
tests are exact."""

from __future__ import annotations

import ast
import html
import html.parser
import json
import math
import re

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import HOSTILE, ROOT, Page, a_run

from jaxfp8rl.cli.main import main
from jaxfp8rl.data.packing import Sample, pack, unpack
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.monitors.report import write_report
from jaxfp8rl.monitors.report.completions import SHOWN, pick, prepared
from jaxfp8rl.monitors.report.page import in_rows
from jaxfp8rl.monitors.report.runs import events, load_runs
from jaxfp8rl.monitors.report.sections import SECTIONS
from jaxfp8rl.rollout.samples import token_lengths
from jaxfp8rl.run.provenance import commit, hardware, versions, write_about


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


def test_a_trajectory_is_shown_as_a_conversation(tmp_path):
    row = {"completion": "4+5-", "token_lengths": [1] * 4, "rollout_logp": [-1.0, 0, -1.0, 0], "step": 1,
           "old_logp": [-2.0, 0, -1.0, 0], "weights": [1, 0, 1, 0], "turns": [[0, 1, 0.0], [2, 3, 0.5]],
           "prompt": "?"}
    (shown,) = prepared([row])
    said = [(label, "".join(t.text for t in tokens)) for label, tokens in shown.pieces]
    assert said == [("turn 1, reward 0", "4"), ("environment", "+"), ("turn 2, reward 0.5", "5")]
    assert shown.tokens[0].level < 0
    assert not any(t.out for t in shown.tokens), "what is from outside is not rejected"
    (plain,) = prepared([row | {"turns": []}])
    assert [label for label, _ in plain.pieces] == [""]


NO_ESTIMATE = '{"step": 1, "problems": 1, "samples": 1, "pass_at_k": {"1": 2}}'
BROKEN = [  # (file, what is put there, what is said of the place)
    ("run.json", "{}", ": it is not a list"),
    ("eval.json", "{", ""), ("eval.json", "[1]", ": record 1 is not"),
    ("eval.json", '{"a": 1}', ": record 1 is not"),
    ("eval.json", NO_ESTIMATE, ": record 1 is not"), ("samples.jsonl", "no\n", ""),
    ("config.toml", "a = = 1\n", ""),
    ("metrics.jsonl", '{"step": 1\n', ": line 1: "),
    ("metrics.jsonl", '{"step": 0}\n{"step": "x"}\n', ": line 2 is not a record"),
    ("metrics.jsonl", '{"step": 0}\n[1]\n', ": line 2 is not a record"),
]


@pytest.mark.parametrize("name,content,place", BROKEN)
def test_what_cannot_be_read_is_an_error_with_its_place(tmp_path, name, content, place, capsys):
    path = a_run(tmp_path / "run", steps=1)
    (path / name).write_text(content)
    assert main(["report", str(path)]) == 2
    assert f"{path / name}{place}" in capsys.readouterr().err and not (path / "report.html").exists()


def test_a_folder_without_a_run_and_one_given_twice(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2 and "is no run directory" in capsys.readouterr().err
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
