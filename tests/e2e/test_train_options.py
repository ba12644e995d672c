"""Whole runs with other ways to learn."""

import json
import zlib

import numpy as np
import pytest
from micro_run import rewarded
from tiny_run import assert_same_run, config, metrics, saved

from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.training import loop

# --- other ways to learn

EVERYTHING = {
    "loss__kl_coef": 0.05, "loss__calibrate_clip_every": 2, "loss__dynamic_sampling_rounds": 4,
    "loss__mask_cut": "true",
    "loss__overlong_buffer": 2, "loss__aggregation": "seq_mean_token_mean", "loss__entropy_coef": 0.001,
    "loss__advantage": "leave_one_out", "correction__preset": "verl/decoupled_k3_rs_token_tis",
    "run__save_every": 3, "run__eval_every": 3, "rollout__kv_scales": "calibrated",
    "selection__keep": 3, "selection__explore": 0.2, "selection__weights": "inverse",
    "optim__lr": 0.002, "optim__warmup_steps": 0,  # far enough for ratios to be clipped
}


def rewarded_in_part(self: RewardRunner, items) -> list[Score]:
    """Groups of every second problem have equal rewards: nothing is learned from them."""
    return [score if zlib.crc32(problem.id.encode()) % 2 else Score(0.0, "ok")
            for score, (problem, _) in zip(rewarded(self, items), items, strict=True)]


@pytest.mark.slow
def test_a_run_with_every_option_of_the_loss_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Reference policy, calibrated clip bounds and scales, and the place in the prompt stream are part of
    what is restored."""
    monkeypatch.setattr(RewardRunner, "score", rewarded_in_part)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    loop.train(config(whole, run__steps=4, **EVERYTHING))
    rows = metrics(whole)
    # not those whose rewards are all equal
    assert all(0 < row["rollout/groups_chosen"] <= 4 for row in rows[1:])
    assert any(row["tokens/rollout"] > 4 * 4 * 4 for row in rows[1:])  # more than one round holds
    assert rows[1]["clip/bound_low"] == rows[1]["clip/bound_high"] == np.float32(0.2)
    bounds = [[r["clip/bound_low"], r["clip/bound_high"]] for r in rows[1:]]
    assert rows[4]["kl"] > 0 and bounds[1] != bounds[0] and saved(whole)[1]["clip"] == bounds[3]
    assert max(saved(whole)[1]["kv_amax"]["k"]) == rows[4]["kv/amax_k"] > 1
    loop.train(config(parted, run__steps=3, **EVERYTHING))
    loop.train(config(parted, run__steps=4, **EVERYTHING), resume=True)
    assert_same_run(parted, whole)


@pytest.mark.slow  # tests/unit/training/test_train_step.py compares the updates
def test_a_run_whose_updates_are_their_own_old_policy_is_the_same_run_without_a_scoring_pass(tmp_path):
    runs = {}
    for old_policy in ("recomputed", "current"):
        loop.train(config(tmp_path / old_policy, run__steps=2, train__updates_per_step=1,
                          loss__old_policy=old_policy))
        runs[old_policy] = metrics(tmp_path / old_policy)[1:]
    for scored, own in zip(*runs.values(), strict=True):
        for key in ("loss", "grad_norm", "reward/mean", "mismatch/k3", "correction/ess", "clip/fraction"):
            np.testing.assert_allclose(own[key], scored[key], rtol=1e-6, atol=1e-9, err_msg=key)
    assert runs["current"][1]["time/score_s"] < runs["recomputed"][1]["time/score_s"]


@pytest.mark.slow
def test_two_policies_need_no_scoring_pass_and_the_probes_join_the_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    options = {"loss__old_policy": "rollout", "loss__objective": "prime_rl",
               "correction__preset": "prime_rl/default"}
    loop.train(config(tmp_path, run__steps=2, run__samples_top_k=3, monitor__precision_every=2, **options))
    for row in map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines()):
        top = np.array(row["top_logp"])
        assert top.shape == np.shape(row["top_ids"]) == (row["tokens"],
                                                         3) and (np.diff(top) <= 0).all() and (top <= 0).all()
    rows = metrics(tmp_path)[1:]
    assert rows[1]["precision/gap_all"] > 0 and "precision/gap_all" not in rows[0] and (
        tmp_path / "precision.json").exists()
    assert all(r["update/applied"] == 1 and r["mismatch/token_mult_prob_error"] >= 1 for r in rows)
    assert all(r["mismatch/max_logp_diff"] < 0.5 for r in rows) and any(r["grad_norm"] > 0 for r in rows)
