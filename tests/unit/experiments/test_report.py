"""The page of an experiment, from lines alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small_protocol import lines, small

from jaxfp8rl.errors import ConfigError, DataError, UserError
from jaxfp8rl.experiments import analysis, report, statistics
from jaxfp8rl.experiments.cells import cells
from jaxfp8rl.experiments.report import write_report
from jaxfp8rl.experiments.results import Result, read_result, read_results
from jaxfp8rl.experiments.runner import NOT_FINITE
from jaxfp8rl.experiments.status import cost, forecast, power_line

A, B = (0.80, 0.84, 0.82), (0.81, 0.84, 0.84)  # of the seeds, at the end


def filled(experiment, work, ends=None, pilot=True):
    """Lines of all cells; of the pilot too."""
    ends = ends or {"bf16": A, "fp8": B}
    for cell in cells(experiment):
        lines(experiment, cell, work, {0: 0.1, 2: 0.5, 4: ends[cell.arm["recipe"]][cell.seed]})
    for cell in cells(experiment, True) if pilot else ():
        wide = 0.02 if cell.arm["recipe"] == "fp8" and cell.seed == 11 else 0.0
        lines(experiment, cell, work, {0: 0.1, 2: 0.5, 4: 0.8 + wide}, seconds=120.0 if wide else 60.0)


def compared(experiment):
    results = read_results(experiment.results)
    found, pilot = (analysis.outcomes(experiment, results, which) for which in (False, True))
    return analysis.compare(experiment, found, pilot)


def test_a_page_has_the_sentence_the_tables_and_the_charts(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    page = write_report(experiment, experiment.results, tmp_path / "page" / "small.md").read_text()
    assert page.startswith(
        "# small\n\nDoes B learn as A does?\n\n**Result.** `bf16` gained +0.720 (+0.670 to +0.770) of "
        "`eval/reward_mean`, 3 seeds. `fp8` is equivalent (margin 0.1) to `bf16` at the end: "
        "+0.010 (-0.015 to "
        "+0.035), 3 seeds.\n\n**Hypothesis.** It does.")
    row, pace = re.findall(r"^\| `bf16` .*$", page, re.M)
    assert [cell.strip() for cell in pace.split("|")][2:4] == ["3 of 3", "1.8"]  # to 0.1 and half of the gain
    assert [cell.strip() for cell in row.split("|")][2:-1] == [
        "3", "0.100 (0.100 to 0.100)", "0.820 (0.770 to 0.870)", "0.660 (0.635 to 0.685)",
        "0.720 (0.670 to 0.770)",
        "2.0", "0.40"]
    assert "1 x NVIDIA H100 (6 cells)" in page and "6 of 6 cells are done" in page
    assert experiment.digest in page
    for chart in re.findall(r"!\[.*\]\((.*)\)", page):
        assert (tmp_path / "page" / chart).read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"!\[", page)) == 2
    pilot = write_report(experiment, experiment.results, tmp_path / "pilot.md", pilot=True).read_text()
    assert pilot.startswith("# small: the pilot") and "4 of 4 cells are done" in pilot


def test_the_mismatch_is_that_of_the_first_and_the_last_five_steps(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    bare = [r for r in read_results(experiment.results) if not r.header["pilot"]]

    def shown(r: Result) -> Result:
        k3 = lambda step: (r.header["seed"] + 1) * (8.0 if step <= 5 else 2.0 if step > 7 else 9e9)
        with_k3 = [{"step": n, "eval/reward_mean": 0.1, "mismatch/k3": k3(n)} for n in range(1, 13)]
        return Result(r.header, with_k3 if r.header["arm"]["recipe"] == "fp8" else r.steps)

    def text(results: list[Result]) -> str:
        return report.page(experiment, results, analysis.outcomes(experiment, bare), [], [])

    found = text([shown(r) for r in bare]).split("## Mismatch")[1].split("##")[0]
    assert "| arm | k3, start | k3, end |" in found and "| `bf16` | - | - |" in found
    assert "| `fp8` | 16 (8 to 24) | 4 (2 to 6) |" in found
    assert "older than `mismatch/equal_fraction`" in found
    assert "## Mismatch" not in text(bare)  # no line has any


def test_a_comparison_is_paired_by_seed(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    (found,) = compared(experiment)
    differences = np.subtract(B, A)
    assert found.difference == pytest.approx(statistics.interval(differences), abs=1e-6)
    assert found.p == pytest.approx(statistics.p_different(differences), rel=1e-3)
    assert found.p_equivalent == pytest.approx(statistics.p_equivalent(differences, 0.1), rel=1e-3)
    spread = statistics.Spread(0.02 / 2**0.5, 1)
    assert found.power == pytest.approx(statistics.equivalence_power(spread, 0.1, 3))
    assert (found.verdict, found.seeds) == ("equivalent", (0, 1, 2))


def test_each_arm_beside_that_with_another_value_of_one_axis(tmp_path):
    """Arms of two axes: the control has other values on both. What one arm lacks is no pair."""
    cache = """[grid.cache]
auto = { rollout.kv_cache = "auto" }
fp8 = { rollout.kv_cache = "fp8" }

[budget]"""
    control = 'recipe = "bf16"'
    experiment = small(tmp_path, ("{ " + control, "{ " + control + ', cache = "auto"'), ("[budget]", cache))
    for cell in cells(experiment):
        of_cache = {"auto": 0.0, "fp8": 0.01 * (1 + cell.seed)}[cell.arm["cache"]]
        of_recipe = {"bf16": A, "fp8": B}[cell.arm["recipe"]][cell.seed]
        lines(experiment, cell, tmp_path / "runs", {0: 0.1, 4: of_recipe + of_cache})
    (experiment.results / "fp8-fp8-s2.jsonl").unlink()
    table = report.against(experiment, experiment.results, "cache=auto")
    assert table.splitlines()[2:] == ["| `bf16-fp8` | `bf16-auto` | 3 | +0.020 (-0.005 to +0.045) |",
                                      "| `fp8-fp8` | `fp8-auto` | 2 | +0.015 (-0.049 to +0.079) |"]
    for choice, why in {"cash=auto": 'no axis "cash".*"cache"', "cache": 'no value of cache ""'}.items():
        with pytest.raises(ConfigError, match=why):
            report.against(experiment, experiment.results, choice)


@pytest.mark.parametrize("ends, verdict", [
    ((0.60, 0.64, 0.61), "worse"), ((0.78, 0.82, 0.799), "worse, within the margin"),
    ((0.7, 0.95, 0.8), "inconclusive"),
    ((0.99, 1.03, 1.0), "better")])
def test_verdicts(tmp_path, ends, verdict):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs", {"bf16": A, "fp8": ends}, pilot=False)
    (found,) = compared(experiment)
    assert found.verdict == verdict and found.power is None


def test_a_test_that_was_not_registered_decides_nothing(tmp_path):
    experiment = small(tmp_path, ("margin = 0.1", 'tests = ["difference"]'))
    filled(experiment, tmp_path / "runs")
    (found,) = compared(experiment)
    assert found.verdict == "inconclusive"
    assert (found.p_equivalent, found.margin, found.power) == (None, None, None)


def test_a_margin_may_be_a_share_of_the_controls_gain(tmp_path):
    experiment = small(tmp_path, ("margin = 0.1", "margin_of_gain = 0.25"))
    filled(experiment, tmp_path / "runs")
    (found,) = compared(experiment)
    margins = 0.25 * (np.array(A) - 0.1)
    assert found.margin == pytest.approx(margins.mean())
    assert found.p_equivalent == pytest.approx(statistics.p_equivalent(np.subtract(B, A), margins), rel=1e-3)


def test_a_cell_that_ended_early_counts_with_its_last_evaluation(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    (tmp_path / "runs" / "fp8-s1" / "metrics.jsonl").unlink()
    lines(experiment, cells(experiment)[3], tmp_path / "runs", {0: 0.1, 2: 0.3}, NOT_FINITE)
    found = analysis.outcomes(experiment, read_results(experiment.results))["fp8"][1]
    assert (found.start, found.end, found.mean) == (0.1, 0.3, 0.3)
    page = write_report(experiment, experiment.results, tmp_path / "small.md").read_text()
    assert f"Ended early, and counted with the last evaluation: `fp8` at seed 1 ({NOT_FINITE})." in page


def test_seeds_that_one_arm_lacks_are_left_out(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    (experiment.results / "fp8-s2.jsonl").unlink()
    (found,) = compared(experiment)
    assert found.seeds == (0, 1)
    (experiment.results / "fp8-s1.jsonl").unlink()
    (found,) = compared(experiment)
    assert found.seeds == (0,) and found.p is None and found.verdict == "inconclusive"


def test_the_cost_is_the_pilots(tmp_path):
    """A cell took one minute or two, and shared its device with another."""
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs")
    results = read_results(experiment.results)
    assert cost(experiment, ["bf16", "fp8", "new"], results).minutes == {
        "bf16": 0.5, "fp8": 0.75, "new": pytest.approx(2.5 / 4)}
    assert forecast(experiment, cells(experiment), results) == (
        "6 cells to run: about 4 minutes of 1 x NVIDIA H100, by the pilot")
    assert power_line(experiment, results) == (
        "power of a test of equivalence: 0.78 with 3 pairs, at margin 0.1 and the pilot's spread 0.0141, if "
        "there is no difference")


def test_without_lines_the_page_says_how_to_get_them(tmp_path):
    with pytest.raises(UserError, match=r"no cell of small is done\n.*jaxfp8rl experiment run small --pilot"):
        write_report(small(tmp_path), tmp_path, tmp_path / "page.md", pilot=True)


@pytest.mark.parametrize("text", ["", "{}\n", "not JSON\n"])
def test_damaged_lines_are_named(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError, match="a.jsonl: not the lines of a cell"):
        read_result(tmp_path / "a.jsonl")


def test_a_metric_that_no_step_has_is_named_with_the_nearest(tmp_path):
    filled(small(tmp_path), tmp_path / "runs")
    other = small(tmp_path, ("margin = 0.1", 'margin = 0.1\nmetric = "time/save_s"'))
    with pytest.raises(DataError, match=r'bf16-s0: no step has .*, time/save_s \(did you mean "time/step_s"'):
        write_report(other, other.results, tmp_path / "page.md")


def test_arms_whose_seeds_all_came_to_one_value_are_not_called_equivalent(tmp_path):
    """As in smollm2_letters: each policy said 1 to every problem. One seed that differs is tested again."""
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs", {"bf16": (0.56,) * 3, "fp8": (0.56,) * 3})
    (c,) = compared(experiment)
    assert c.verdict == "inconclusive" and c.p is None and c.p_equivalent is None
    page = write_report(experiment, experiment.results, tmp_path / "page.md").read_text()
    assert "**All seeds of `bf16`, `fp8` came to the same value (0.560).**" in page
    assert "equivalent" not in page.split("##")[0]


def test_an_arm_that_has_the_controls_own_values_is_equivalent(tmp_path):
    experiment = small(tmp_path)
    filled(experiment, tmp_path / "runs", {"bf16": A, "fp8": A})
    assert compared(experiment)[0].verdict == "equivalent"
