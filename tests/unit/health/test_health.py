"""A run is judged by one table: what is ill is called ill, everywhere in the same words, and what is healthy
is left alone."""

from __future__ import annotations

import html
import io
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.health import table
from jaxfp8rl.health.judges import Bound, Level
from jaxfp8rl.health.table import RULES, verdict
from jaxfp8rl.monitors.end.extremes import extremes, one_line
from jaxfp8rl.monitors.end.summary import write_summary
from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.monitors.sparkline import sparkline
from jaxfp8rl.run.run_directory import RunDirectory

ROOT = Path(__file__).parents[3]
NAN, INF = math.nan, math.inf
HEALTHY = {
    "mismatch/token_mult_prob_error": 1.01, "mismatch/k3": 1e-4, "correction/ess": 0.99,
    "correction/weight_mean": 1.0,
    "correction/truncated_fraction": 0.001, "correction/rejected_fraction": 0.0, "clip/fraction": 0.0,
    "entropy": 0.5,
    "response/cut_fraction": 0.0, "reward/std": 0.4, "reward/groups_solved_in_part": 0.7,
    "reward/undefined": 0, "loss": 0.1,
    "rollout/groups_rejected": 0, "rollout/groups_chosen": 8, "update/applied": 1.0, "update/overflow": 0.0,
    "grad_norm": 1.0,
    "engine/healthy": 1, "engine/restarts": 0, "tokens/rollout": 6400, "response/length_mean": 100.0,
    "eval/undefined": 0,
    "eval/problems": 100, "eval/commonest_share": 0.05,
}


def a_run(steps: int = 20, **changed) -> list[dict]:
    """Healthy, its reward rising; `changed`: a metric, "/" as "__", to its value or to a function of the
    step."""
    changed = {key.replace("__", "/"): value for key, value in changed.items()}
    value = lambda v, step: v(step) if callable(v) else v
    base = HEALTHY | {"reward/mean": lambda step: 0.3 + 0.02 * step,
                      "eval/reward_mean": lambda step: 0.3 + 0.02 * step}
    return [{"step": s, **{k: value(v, s) for k, v in (base | changed).items()}} for s in range(1, steps + 1)]


def once(value, other, step=7):
    return lambda s: value if s == step else other


ILL = [  # (what is changed, what the verdict has to say)
    ({"mismatch__token_mult_prob_error": 1.15}, "mismatch 1.15 in the median"),
    ({"mismatch__token_mult_prob_error": once(20.8, 1.01)}, "mismatch 20.8 at step 7"),
    ({"mismatch__token_mult_prob_error": once(20.8, 1.15)},
     "mismatch 1.15 in the median, 20.8 at step 7 (healthy below 1.05)"),
    ({"mismatch__token_mult_prob_error": lambda s: 1.5 if s > 17 else 1.01}, "1.5 in the last 3 steps"),
    ({"mismatch__token_mult_prob_error": once(NAN, 1.01)}, "mismatch not finite at step 7"),
    ({"mismatch__token_mult_prob_error": once(INF, 1.01)}, "mismatch not finite at step 7"),
    ({"mismatch__k3": 0.05}, "mismatch k3 0.05"),
    ({"correction__ess": 0.1}, "effective sample size 0.1"),
    ({"correction__weight_mean": 3.0}, "mean weight 3"),
    ({"correction__weight_mean": 0.2}, "mean weight 0.2"),
    ({"correction__truncated_fraction": 0.4}, "truncated weights 0.4"),
    ({"correction__rejected_fraction": 0.6}, "rejected tokens 0.6"),
    ({"clip__fraction": 0.8}, "clipped tokens 0.8"),
    ({"response__cut_fraction": 1.0}, "cut completions 1"),
    ({"reward__mean": 0.0, "reward__std": 0.0, "reward__groups_solved_in_part": 0.0},
     "all rewards were 0 in 20 of 20"),
    ({"reward__mean": 1.0, "reward__std": 0.0, "reward__groups_solved_in_part": 0.0},
     "all rewards were 1 in 20 of 20"),
    ({"reward__mean": -0.5, "reward__std": 0.0, "reward__groups_solved_in_part": 0.0},
     "all rewards were -0.5"),
    ({"reward__mean": 0.5, "reward__groups_solved_in_part": 0.0}, "all rewards of each group were equal"),
    ({"reward__mean": lambda s: 0.6 * (s < 15), "reward__std": lambda s: 0.4 * (s < 15)},
     "all rewards were 0 in 6 of 20"),
    ({"reward__mean": lambda s: 0.8 if s < 12 else 0.2}, "reward fell from 0.8 to 0.2"),
    ({"eval__reward_mean": lambda s: 0.8 if s < 20 else 0.2}, "held-out reward fell from 0.8 to 0.2"),
    ({"eval__commonest_share": lambda s: 0.96 if s > 15 else 0.05},
     "96% of the held-out problems got the same completion at the end"),
    ({"reward__mean": NAN}, "reward not finite"),
    ({"reward__undefined": 40}, "completions had no score in 20 of 20 steps"),
    ({"rollout__groups_rejected": 4}, "groups of completions were unusable"),
    ({"update__applied": 0.5}, "an update was not applied in 20 of 20"),
    ({"update__applied": 0.0, "update__overflow": 1.0}, "overflowed"),
    ({"loss": once(NAN, 0.1)}, "the loss was not finite at step 7"),
    ({"grad_norm": once(500.0, 1.0)}, "gradient norm 500 at step 7, 500 times"),
    ({"grad_norm": once(NAN, 1.0)}, "gradient norm not finite"),
    ({"grad_norm": lambda s: 3.0**s}, "gradient norm"),
    ({"entropy": lambda s: 0.5 * 0.6**s, "reward__mean": 0.3}, "entropy went from"),
    ({"entropy": lambda s: 0.5 + 0.3 * s, "reward__mean": 0.3}, "entropy went from"),
    ({"engine__healthy": 0}, "the engine was not healthy"),
    ({"engine__restarts": lambda s: s // 4}, "restarted 5 times"),
]
WARNED = [
    ({"mismatch__token_mult_prob_error": 1.07}, "mismatch 1.07 in the median"),
    ({"mismatch__token_mult_prob_error": 1.0502}, "mismatch 1.0502 in the median"),
    ({"mismatch__token_mult_prob_error": once(1.3, 1.01)}, "mismatch 1.3 at step 7"),
    ({"correction__ess": 0.4}, "effective sample size 0.4"),
    ({"reward__undefined": once(1, 0)}, "completions had no score at step 7"),
    ({"update__applied": once(0.0, 1.0)}, "an update was not applied at step 7"),
    ({"grad_norm": once(30.0, 1.0)}, "30 times"),
    ({"engine__restarts": lambda s: int(s > 3)}, "restarted 1 time"),
    ({"eval__commonest_share": 0.8}, "80% of the held-out problems got the same completion"),
    ({"eval__reward_mean": lambda s: 0.95 if s < 20 else 0.7}, "held-out reward fell"),
]


CASES = [(level, *case) for level, cases in ((Level.ILL, ILL), (Level.WARNING, WARNED)) for case in cases]


@pytest.mark.parametrize("level,changed,said", CASES)
def test_what_is_not_healthy_is_said(level, changed, said):
    found = verdict(a_run(**changed))
    assert found.level == level and found.line.startswith(f"{level}: ") and said in found.line, found.line
    assert "\n" not in found.line and all(f.remedy for f in found.findings)


SOLVED = {  # the whole batch is right at the end, and the policy is sure of it
    "reward__mean": lambda s: min(1.0, 0.1 * s), "reward__std": lambda s: 0.4 * (s < 10),
    "entropy": lambda s: 0.5 * 0.85**s,
    "reward__groups_solved_in_part": lambda s: 0.7 * (s < 10),
}


@pytest.mark.parametrize("changed", [
    {}, SOLVED, {"eval__commonest_share": 1.0, "eval__problems": 8},
    {"eval__commonest_share": once(1.0, 0.05)},
    {"mismatch__token_mult_prob_error": 1.0}, {"reward__mean": lambda s: 0.5 + 0.1 * (-1) ** s},
    {"reward__mean": lambda s: -1 + 0.05 * s}, {"grad_norm": lambda s: 5.0 + 3 * (s % 3)},
    # fp16's first
    {"update__applied": once(0.0, 1.0, 1), "update__overflow": once(1.0, 0.0, 1),
     "grad_norm": once(INF, 1.0, 1)},
])
def test_what_is_healthy_is_left_alone(changed):
    assert verdict(a_run(**changed)).line == "healthy"


def test_the_demos_that_were_run_are_healthy():
    """The committed curves of `make demo` and `make demo-vllm`."""
    curves = json.loads((ROOT / "benchmarks/results/demo_cpu.json").read_text())["curves"]
    found = [verdict([dict(zip(c, row)) for row in zip(*c.values())]).line for seed in curves.values()
             for c in seed.values()]
    assert found == ["healthy"] * 6


BOUNDS = [rule for rule in RULES if isinstance(rule, Bound)]
VALUES = st.lists(st.floats(0.0, 30.0), min_size=1, max_size=30)


@given(st.sampled_from(BOUNDS), VALUES, st.data())
def test_a_worse_step_never_makes_a_run_healthier(rule, values, data):
    place = data.draw(st.integers(0, len(values) - 1))
    worse = [*values]
    worse[place] += data.draw(st.floats(0, 10)) * (1 if rule.above else -1)
    levels = [verdict([{"step": i, rule.key: v} for i, v in enumerate(vs)]).level for vs in (values, worse)]
    other = [r for r in BOUNDS if r.key == rule.key and r is not rule]
    assert levels[0] <= levels[1] or other


@given(VALUES, st.floats(0, 30))
def test_a_value_is_shown_on_its_own_side_of_a_bound(values, bound):
    for value in values:
        text = table.Bound("k", "n", bound, bound, "", "").show(value).replace(",", "")
        assert (float(text) > bound) == (value > bound) or abs(value) >= 1000


def test_no_step_no_verdict():
    assert verdict([]).line == "unknown: no step was taken"
    assert verdict([{"step": 0, "eval/reward_mean": 0.1, "gate/max_gap": 1e-6}]).word == "unknown"


def test_a_metric_that_turns_ill_is_noted_once(tmp_path):
    with RunDirectory(load_config("demo", ["--run.dir", str(tmp_path)]), resume=False) as run:
        for record in a_run(9, mismatch__token_mult_prob_error=lambda s: 1.01 if s < 5 else 20.8):
            run.log(record)
    (note,) = (tmp_path / "notes.txt").read_text().splitlines()
    assert "step 5: mismatch 20.8 (healthy below 1.05); compare weights" in note


# --- in the same words everywhere


def written(folder: Path, records, samples=()) -> Path:
    for name, rows in (("metrics", records), ("samples", samples)):
        monitor = JsonlMonitor(folder / f"{name}.jsonl")
        for row in rows:
            monitor.log(row)
        monitor.close()
    return folder


@pytest.mark.parametrize("changed",
                         [{}, {"mismatch__token_mult_prob_error": once(20.8, 1.15)}, {"loss": NAN}])
def test_console_note_summary_and_report_agree(tmp_path, changed, capsys):
    records = a_run(**changed)
    line, out = verdict(records).line, io.StringIO()
    write_summary(written(tmp_path, records), Console(file=out, width=80))
    # whole, though it may be longer than the terminal is wide
    assert out.getvalue().splitlines()[-1] == f"verdict: {line}"
    assert (tmp_path / "notes.txt").read_text().endswith(f"UTC  verdict: {line}\n")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["line"] == line and summary["verdict"] == line.partition(":")[0]
    assert [f["level"] for f in summary["findings"]] == ["ill"] * bool(changed)
    (tmp_path / "summary.json").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert f"verdict: {line}" in capsys.readouterr().out
    page = html.unescape((tmp_path / "report.html").read_text())
    header, rest = page.split("</header>")
    assert line in header and all(f["text"] in rest and f["remedy"] in rest for f in summary["findings"])
    assert ("stayed in its healthy range" in rest) == (not changed)


def cells(page: str) -> list[tuple[str, str]]:
    """(metric, the cell under "healthy") of the tables of a page that have one."""
    found = []
    for head, rows in re.findall(r"^(\| (?:key|metric)\b.*)\n\|[-|]+\n((?:\|.*\n)+)",
                                 (ROOT / "docs" / page).read_text(), re.M):
        columns = [c.strip() for c in head.split("|")[1:-1]]
        for row in rows.splitlines() if "healthy" in columns else ():
            values = [c.strip() for c in re.split(r"(?<!\\)\|", row)[1:-1]]
            prefix = next(iter(re.findall(r"`(\w+/)", values[0])), "")
            for key in re.findall(r"`([^`]+)`", values[0]):
                found.append((key if "/" in key else prefix + key, values[columns.index("healthy")]))
    return found


def test_the_page_of_metrics_gives_the_limits_of_the_table():
    limits = {rule.key: table.ranges(rule.key) for rule in BOUNDS}
    told = [(key, cell) for key, cell in cells("metrics.md") if key in limits]
    assert len(told) >= 8 and [(key, cell) for key, cell in told if limits[key] not in cell] == []


def test_the_page_is_the_table():
    assert table.table() in (ROOT / "docs" / "health.md").read_text()


# --- completions


def test_best_and_worst_are_the_latest_of_their_reward(tmp_path):
    rows = [{"step": s, "prompt": f"p{s}", "completion": "c", "answer": "a", "reward": r}
            for s, r in enumerate([0.0, 1.0, NAN, 0.0, 1.0, 0.5, None])]
    found = extremes(written(tmp_path, [], rows) / "samples.jsonl")
    assert (found["best"]["step"], found["worst"]["step"]) == (4, 3)
    equal = extremes(written(tmp_path / "equal", [], rows[:1] * 3) / "samples.jsonl")
    assert equal.keys() == {"worst"} and extremes(tmp_path / "none") == {}


def test_best_and_worst_are_shown(tmp_path):
    chat = [{"role": "user", "content": "3+4?"}]
    rows = [{"step": 1, "prompt": chat, "completion": "sev\x1b[31men\n", "answer": "7", "reward": 0.0},
            {"step": 2, "prompt": "1+1=", "completion": "2", "answer": "2", "reward": 1.0}]
    out = io.StringIO()
    write_summary(written(tmp_path, a_run(), rows), Console(file=out, width=80))
    assert ("best sampled completion: reward 1 at step 2\n  prompt      1+1=\n  completion  2\n"
            "  answer      2\n") in out.getvalue()
    assert ("reward 0 at step 1\n  prompt      user: 3+4?\n  completion  sev\\x1b[31men\\n\n"
            "  answer      7\n") in out.getvalue()
    assert json.loads((tmp_path / "summary.json").read_text())["worst"]["answer"] == "7"
    main(["report", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "The best completion, reward 1" in page and "The worst completion, reward 0" in page


@given(st.text(max_size=2000))
def test_what_a_terminal_is_given_is_one_printable_line(text):
    assert one_line(text).isprintable() and len(one_line(text)) <= 230


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200))
def test_a_sparkline_fits_and_shows_the_ends(values):
    drawn = sparkline(values)
    assert 1 <= len(drawn) <= 40 and set(drawn) <= set("\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588")
    assert sparkline([1.0] * 50) == "\u2585" * 40 and sparkline([0, 1, 2, 3]) == "\u2581\u2583\u2586\u2588"


@pytest.mark.parametrize("key, value", [("mismatch/token_mult_prob_error", 2.5), ("mismatch/k3", 0.05)])
def test_noise_on_the_gains_explains_a_mismatch_and_hides_none(key, value):
    """The first stage has no noise; sigma of the others raises the mismatch."""
    sigma, name = (lambda s: 0.0 if s <= 4 else 0.02), key.replace("/", "__")
    run = lambda of: a_run(noise__sigma=sigma, **{name: of})
    high = lambda s: value if sigma(s) else HEALTHY[key]
    told = verdict(run(high))
    assert told.level == Level.WARNING and "in the steps with noise" in told.line
    assert "noise.start" in told.findings[0].remedy
    assert verdict(a_run(**{name: high})).level == Level.ILL  # without noise nothing explains it
    assert table.level_of(key, {key: value, "noise/sigma": 0.02}) == Level.WARNING
    assert table.level_of(key, {key: value, "noise/sigma": 0.0}) == Level.ILL
    assert verdict(run(value)).level == Level.ILL  # nor where the steps without noise have it, too
    assert verdict(run(lambda s: NAN if s == 9 else high(s))).level == Level.ILL
    watch, notes = table.Watch(), []
    for record in run(lambda s: value if s > 3 else HEALTHY[key]):
        notes += watch.notes(record)
    if key.endswith("error"):  # k3 is judged over the run alone
        assert len(notes) == 2 and "step 4: " in notes[0] and "noise" not in notes[0]
        assert "step 5: " in notes[1] and "noise.start" in notes[1]
