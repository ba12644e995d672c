"""Guests of an experiment: another trainer's lines on the page, and those that do not belong there."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_protocol import small
from test_report import A, filled

from benchmarks import trl_learns
from jaxfp8rl.errors import DataError
from jaxfp8rl.experiments import analysis, charts, statistics
from jaxfp8rl.experiments.beside import FOLDER, read_guests
from jaxfp8rl.experiments.cells import cells, name_of
from jaxfp8rl.experiments.report import write_report
from jaxfp8rl.experiments.results import read_result, read_results, write_lines

ENDS = (0.70, 0.84, 0.80)  # of the seeds


def guest(experiment, seed=0, end=0.7, changed=()):
    """The lines of a guest beside the control's cell of that seed."""
    control = next(c for c in cells(experiment) if c.seed == seed and name_of(c.arm) == "bf16")
    header = read_result(experiment.results / f"{control.name}.jsonl").header
    header |= {"cell": f"trl-s{seed}", "arm": {FOLDER: "trl"}, "title": "TRL 1.16.0, BF16",
               "start_s": 40.0 + seed, "differs": ["One thing.", "Another."]}
    steps = [{"step": 0, "eval/reward_mean": 0.1}, {"step": 2, "eval/reward_mean": 0.5, "time/step_s": 60.0},
             {"step": 4, "eval/reward_mean": end, "time/step_s": 60.0, "tokens/rollout": 3e6}]
    path = experiment.results / FOLDER / f"trl-s{seed}.jsonl"
    write_lines(path, experiment, {k: v for k, v in (header | dict(changed)).items() if v is not None}, steps)
    return path


@pytest.fixture
def experiment(tmp_path):
    found = small(tmp_path)
    filled(found, tmp_path / "runs", pilot=False)
    return found


def page(experiment, tmp_path):
    return write_report(experiment, experiment.results, tmp_path / "page.md").read_text()


def test_a_guest_has_a_table_of_its_own_with_an_interval_and_no_verdict(experiment, tmp_path, monkeypatch):
    before, drawn = page(experiment, tmp_path), []
    for seed, end in enumerate(ENDS):
        guest(experiment, seed, end)
    monkeypatch.setattr(charts, "_curve", lambda ax, found, *rest: drawn.append((len(found), *rest[-3:])))
    after = page(experiment, tmp_path)
    start, _, rest = after.partition("## Beside, not of this protocol\n\n")
    own, _, end = rest.partition("## Protocol")
    assert start + "## Protocol" + end == before  # nothing else of the page changes
    e = statistics.interval(np.subtract(ENDS, A))
    (row,) = re.findall(r"^\| TRL.*$", own, re.M)
    assert [cell.strip() for cell in row.split("|")][1:-1] == [
        "TRL 1.16.0, BF16", "3", "0.100 (0.100 to 0.100)", "0.780 (0.601 to 0.959)", "0.640 (0.550 to 0.730)",
        "0.680 (0.501 to 0.859)", "2.0", "3.00", "3", f"{e.mean:+.3f} ({e.low:+.3f} to {e.high:+.3f})"]
    assert "41 s from the command to the first step" in own and own.count("- One thing.\n- Another.") == 1
    assert drawn[-2:] == [(3, "TRL 1.16.0, BF16 (3)", "black", "--")] * 2


def test_a_guest_is_paired_with_the_seeds_that_the_control_has(experiment, tmp_path):
    guest(experiment, 0)
    path = guest(experiment, 1)
    (experiment.results / "bf16-s1.jsonl").unlink()
    results = read_results(experiment.results)
    (found,) = read_guests(experiment, experiment.results, results, analysis.outcomes(experiment, results))
    assert found.paired == (0,) and sorted(found.outcomes) == [0, 1] and path.is_file()
    assert "-0.100 |" in page(experiment, tmp_path)


@pytest.mark.parametrize("changed, said", [
    ({"config": "another"}, "trl-s0 ran beside other settings than those of bf16-s0"),
    ({"experiment": "large"}, "trl-s0 ran beside the experiment large"),
    ({"differs": None}, "trl-s0: not the lines of a guest: the header has no differs")])
def test_lines_that_are_no_guests_are_refused(experiment, tmp_path, changed, said):
    guest(experiment, changed=changed)
    with pytest.raises(DataError, match=said):
        page(experiment, tmp_path)


def test_a_pilots_page_has_no_guests(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    guest(experiment)
    text = write_report(experiment, experiment.results, tmp_path / "pilot.md", pilot=True).read_text()
    assert "TRL" not in text


def test_trl_is_given_what_the_control_of_smollm2_sums_says(tmp_path):
    """Rates included: those of TRL's schedule, of which the first update's is not 0."""
    import argparse

    from jaxfp8rl.experiments.protocol import load_protocol
    from jaxfp8rl.optim.schedule import make_schedule

    args = argparse.Namespace(seeds=[3], work=tmp_path, microbatch=64, liger=False, no_vllm=False)
    (found,) = trl_learns.guests_of(load_protocol("smollm2_sums"), args, tmp_path, [])
    given = trl_learns.trainer_settings(found.cfg, tmp_path, args)
    assert (given["max_steps"], given["num_generations"], given["gradient_accumulation_steps"]) == (40, 8, 8)
    assert (given["seed"], given["adam_beta2"], given["max_completion_length"]) == (3, 0.95, 48)
    warm, share = given["warmup_steps"], given["lr_scheduler_kwargs"]["min_lr_ratio"]
    theirs = [given["learning_rate"] * min(1.0, k / warm * (1 - share) + share) for k in range(5)]
    ours = make_schedule(found.cfg.optim, found.cfg.updates)
    assert theirs == pytest.approx([float(ours(k)) for k in range(5)])
    assert list(found.folders()) == [0, 10, 20, 30, 40]


def test_a_setting_that_trl_would_not_be_given_is_named(tmp_path):
    import argparse

    from jaxfp8rl.experiments.protocol import load_protocol

    args = argparse.Namespace(seeds=[0], work=tmp_path, microbatch=64, liger=False, no_vllm=False)
    with pytest.raises(SystemExit, match="rollout.top_k of the control has no counterpart"):
        trl_learns.guests_of(load_protocol("smollm2_sums"), args, tmp_path, ["--rollout.top_k", "5"])
