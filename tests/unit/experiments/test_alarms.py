"""Whether metrics warn before a reward falls."""

from __future__ import annotations

import math

import pytest
from small_protocol import lines, small

from jaxfp8rl.experiments.alarms import alarms, fell_at, spoke_at
from jaxfp8rl.experiments.cells import cells
from jaxfp8rl.experiments.report import write_report
from jaxfp8rl.experiments.results import Result
from jaxfp8rl.health.table import RULES

STEPS = 40
K3 = next(rule for rule in RULES if rule.key == "mismatch/k3")


def result(fall: int | None, ill: int | None, last: float = 0.0, grad_norm: float = 1.0) -> Result:
    """Lines of a reward that rises, and from step `fall` on is `last`; from step `ill` on k3 is 1."""
    steps = [{"step": 0, "eval/reward_mean": 0.1}]
    for step in range(1, STEPS + 1):
        reward = last if fall and step >= fall else min(0.6, 0.1 + step / 50)
        steps.append({"step": step, "reward/mean": reward, "grad_norm": grad_norm,
                      "mismatch/k3": 1.0 if ill and step >= ill else 1e-4})
    return Result({}, steps)


def of(results, key):
    return next(alarm for alarm in alarms(results) if alarm.rule.key == key)


@pytest.mark.parametrize("fall", [20, 25, 30])
def test_a_fall_is_where_the_reward_stays_down(fall):
    """A mean of the last steps is judged, so it is found some steps late."""
    found = fell_at(result(fall, None).steps[1:])
    assert found and fall <= found <= fall + 4
    assert fell_at(result(None, None).steps[1:]) is None
    assert fell_at(result(fall, None, last=0.4).steps[1:]) is None  # a third of its best


def test_a_reward_that_recovers_did_not_fall():
    steps = result(20, None).steps[1:]
    for step in steps[25:]:
        step["reward/mean"] = 0.6
    assert fell_at(steps) is None


def test_a_held_out_reward_that_falls_is_a_fall_though_the_training_reward_holds():
    """As with stale completions at a high rate, of which half are of problems too easy to lose."""
    steps = result(None, 11).steps
    for step, reward in {0: 0.2, 10: 0.6, 20: 0.55, 30: 0.1, 40: 0.0}.items():
        steps[step] |= {"eval/reward_mean": reward, "eval/problems": 200}
    assert fell_at(steps) == 30
    assert fell_at(steps[:30]) is None
    fallen = result(25, None).steps
    fallen[40] |= {"eval/reward_mean": 0.0, "eval/problems": 200}
    assert fell_at(fallen) == fell_at(result(25, None).steps), "the earlier of the two"
    assert of([Result({}, steps), result(None, 11)], "mismatch/k3").ahead[0] in range(16, 20)


def test_an_alarm_is_before_the_fall_after_it_or_false():
    early, late, never, false, quiet = (result(25, 11), result(25, 37), result(25, None), result(None, 11),
                                        result(None, None))
    alarm = of([early, late, never, false, quiet], "mismatch/k3")
    fallen = fell_at(early.steps[1:])
    spoke = spoke_at(K3, early.steps[1:])
    assert fallen and spoke and 11 <= spoke <= 14
    assert alarm.ahead[0] == fallen - spoke and alarm.before == [fallen - spoke]
    assert alarm.ahead[1] is not None and alarm.ahead[1] < 0 and alarm.ahead[2] is None
    assert (alarm.without, alarm.held) == (1, 2)
    assert of([early, quiet], "grad_norm").ahead == (None,)
    assert not alarms([false, quiet])  # nothing fell


def test_what_is_not_finite_speaks_at_once():
    steps = result(25, None).steps[1:]
    steps[4]["mismatch/k3"] = math.inf
    assert spoke_at(K3, steps) == 5


def test_the_page_has_them_if_a_reward_fell(tmp_path):
    experiment = small(tmp_path, ("steps = 4", "steps = 12"))
    for cell in cells(experiment):
        path = lines(experiment, cell, tmp_path / "runs", {0: 0.1, 12: 0.2})
        falls = cell.arm["recipe"] == "fp8"
        text = path.read_text().splitlines()
        for n in range(2, len(text)):
            reward = 0.05 if falls and n > 7 else 0.8
            text[n] = text[n].replace('"step"', f'"reward/mean": {reward}, "grad_norm": 1.0, "step"', 1)
        path.write_text("\n".join(text) + "\n")
    page = write_report(experiment, experiment.results, tmp_path / "page.md").read_text()
    assert "## Alarms" in page and "| 0 of 3 | - | 0 of 3 |" in page
