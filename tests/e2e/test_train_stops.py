"""What stops a run, what does not, and what it leaves behind."""

import dataclasses

import jax
import numpy as np
import pytest
from micro_run import rewarded
from safetensors.numpy import load_file
from tiny_run import config, metrics, saved, words

from bridges.engines.embedded_engine import EmbeddedEngine
from bridges.transports.embedded import EmbeddedTransport
from jaxfp8rl.cli.main import main
from jaxfp8rl.config import rules, sampling_rules
from jaxfp8rl.errors import NonFiniteStep
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.rollout import adapters, scored_groups
from jaxfp8rl.training import loop, start

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow  # the fast forms: tests/unit/optim/test_optim.py, and row 1 of tests/faults
def test_updates_that_are_not_finite_stop_the_run_and_leave_it_resumable(tmp_path, monkeypatch, capsys):
    to_samples, calls = scored_groups.to_samples, []

    def poisoned(*args):
        calls.append(1)
        return [[s._replace(advantage=float("nan")) if len(calls) > 2 else s for s in g]
                for g in to_samples(*args)]

    monkeypatch.setattr(scored_groups, "to_samples", poisoned)
    monkeypatch.setattr(RewardRunner, "score", rewarded)  # every update has something to learn
    assert main(["train", "demo",
                 *words(tmp_path, run__save_every=1, optim__max_bad_steps=3)]) == NonFiniteStep.exit_code == 4
    assert "3 updates in a row were not finite" in (
        said := capsys.readouterr().err) and "bad_batch.safetensors" in said
    assert "advantages" in said  # what was wrong, not only that something was
    state, _, step = saved(tmp_path)
    assert step == 3 and int(state.bad_steps) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    rows = metrics(tmp_path)
    assert [r["update/applied"]
            for r in rows[1:]] == [1, 1, 0] and int(state.step) == 4 and np.isnan(rows[3]["loss"])
    bad = load_file(tmp_path / "bad_batch.safetensors")
    assert np.isnan(bad["advantages"][bad["response_mask"]]).all() and bad["old_logp"].shape == bad[
        "tokens"].shape
    monkeypatch.setattr(scored_groups, "to_samples", to_samples)
    loop.train(config(tmp_path, run__steps=4), resume=True)
    assert metrics(tmp_path)[-1]["update/applied"] == 1 and int(saved(tmp_path)[0].bad_steps) == 0


def test_an_engine_with_other_weights_fails_the_gate(tmp_path, monkeypatch, capsys):
    class Perturbed(LearnerWeights):
        def __init__(self, cfg, params, *args):
            noisy = lambda p: p * (
                1 + 0.5 * jax.random.normal(jax.random.key(0), p.shape)) if p.dtype == np.float32 else p
            super().__init__(cfg, jax.tree.map(noisy, params), *args)  # scales for codes, values for the rest

    monkeypatch.setattr(adapters, "LearnerWeights", Perturbed)
    assert main(["train", "demo", *words(tmp_path, sft__steps=0)]) == 3
    said = capsys.readouterr().err
    assert "disagree at equal weights" in said and "worst token: " in said and "next step:" in said
    assert metrics(tmp_path) == []


def test_a_group_that_cannot_be_learned_from_is_left_out_and_counted(tmp_path, monkeypatch):
    """Every step one completion of the second prompt comes back with a NaN; the other three groups are
    learned from."""
    sift = scored_groups.sift

    def spoilt(answers, *more):
        answers = list(answers)
        prompt, request, completions, versions = answers[1]
        if request.n > 1:
            values = np.full_like(completions[2].logprobs, np.nan)
            broken = dataclasses.replace(completions[2], logprobs=values)
            answers[1] = prompt, request, (*completions[:2], broken, *completions[3:]), versions
        return sift(answers, *more)

    monkeypatch.setattr(scored_groups, "sift", spoilt)
    monkeypatch.setattr(RewardRunner, "score",
                        lambda self, items: [Score(i % 2, "ok") for i in range(len(items))])
    loop.train(config(tmp_path, run__steps=2, sft__steps=0))
    for row in metrics(tmp_path)[1:]:
        assert row["rollout/groups_rejected"] == 1 and row["update/applied"] == 1 and np.isfinite(row["loss"])


def test_an_engine_sleeps_while_the_learner_learns_and_wakes_for_the_publish(tmp_path, monkeypatch):
    """The embedded engine stands for vLLM, which sleeps on a GPU alone: it too loses its weights, and says so
    when asked."""
    calls = []

    def recorded(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(name), original(*a, **k))[1])

    of_engine = ((EmbeddedEngine, name) for name in ("sleep", "wake", "generate"))
    for owner, name in (*of_engine, (loop, "score"),
                        (loop, "run_updates"),
                        (start, "warm_start")):
        recorded(owner, name)
    recorded(EmbeddedTransport, "publish")
    others = tuple(rule for rule in rules.RULES if rule not in sampling_rules.SERVER)
    monkeypatch.setattr(rules, "RULES", others)
    loop.train(config(tmp_path, run__steps=2, run__eval_every=0, sft__steps=1, rollout__sleep="drop_weights"))
    step = ["generate", "sleep", "score", "score", "run_updates", "wake", "publish"]
    assert calls == ["sleep", "warm_start", "wake", "publish", "generate", "generate", *step, *step,
                     "generate"]
