"""A policy learns in several turns what it cannot in one."""

from __future__ import annotations

import functools
import importlib.util
import json
import time
from pathlib import Path

import micro_run
import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.training.loop import train

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {"run.steps": 2, "run.save_every": 2, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
         "train.rows_per_microbatch": 8, "model.config.hidden_size": 32, "model.config.intermediate_size": 32,
         "model.config.num_attention_heads": 1, "model.config.num_key_value_heads": 1,
         "optim.warmup_steps": 0}


words = functools.partial(micro_run.words, of={})


def rewards(folder: Path) -> list[float]:
    return [row["reward/mean"] for row in read_metrics(folder / "metrics.jsonl") if "reward/mean" in row]


def test_a_run_plays_ahead_saves_and_logs(tmp_path, quick_compile):
    """Trajectories are sampled ahead, so they are in the checkpoint and in the record of a step."""
    small = {k.replace(".", "__"): v for k, v in SMALL.items()} | {"rollout__max_staleness": 1}
    train(load_config(str(EXAMPLES / "guess.toml"), words(tmp_path / "straight", **small)))
    row = read_metrics(tmp_path / "straight" / "metrics.jsonl")[-1]
    assert 1 < row["turns/mean"] <= 4 and row["turns/outside_tokens_mean"] == pytest.approx(row["turns/mean"]
                                                                                            - 1, abs=1)
    assert row["turns/errors"] == row["turns/timeouts"] == row["turns/crashes"] == 0
    assert row["staleness/versions_max"] == 1
    sample = json.loads((tmp_path / "straight" / "samples.jsonl").read_text().splitlines()[-1])
    assert sample["tokens"] == len(sample["turns"]) and sample["end"] in ("done", "turns")
    assert len(sample["rollout_logp"]) == sample["turns"][-1][1] == len(sample["old_logp"])
    assert sum(sample["token_lengths"]) == len(sample["completion"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "alone"), [("guess", 1 / 7), ("calculator", 1 / 3)])
def test_turns_are_learned_and_one_turn_is_not_enough(name, alone, tmp_path):
    """From random weights. `alone`: the most that one turn can get, but for luck in a batch."""
    began = time.monotonic()
    train(load_config(str(EXAMPLES / f"{name}.toml"), words(tmp_path / "turns")))
    print(f"{name}: {time.monotonic() - began:.0f} s")
    found = rewards(tmp_path / "turns")
    assert found[0] <= 0.3 and sum(found[-5:]) / 5 >= 0.8
    train(load_config(str(EXAMPLES / f"{name}.toml"),
                      words(tmp_path / "single", environment__max_turns=1, run__steps=40)))
    assert sum(rewards(tmp_path / "single")[-5:]) / 5 < alone + 0.05


@pytest.mark.slow  # tests/unit/training/test_shared_prefix.py has the update alone
@pytest.mark.timeout(900)
def test_a_run_that_holds_shared_prefixes_once_learns_the_same(tmp_path, quick_compile):
    """Of a step: equal rollouts, and equal numbers but for the order of sums."""
    short = {"run__steps": 1, "run__save_every": 0, "run__eval_every": 0, "sft__steps": 0,
             "optim__warmup_steps": 0,
             "rollout__prompts_per_step": 8, "precision__recipe": "bf16", "rollout__kv_cache": "auto",
             "precision__weight_dtype": "float32", "model__config__num_hidden_layers": 1}
    for name, least in (("plain", 0), ("tree", 3)):
        train(load_config("demo", words(tmp_path / name, **short, train__shared_prefix=least)))
    plain, tree = (read_metrics(tmp_path / name / "metrics.jsonl")[1] for name in ("plain", "tree"))
    assert 0.3 < tree.pop("update/shared_fraction") < 0.5
    assert tree["reward/mean"] == plain["reward/mean"] and tree["tokens/update"] == plain["tokens/update"]
    for key in ("loss", "entropy", "grad_norm", "mismatch/k3", "correction/ess", "mismatch/learner_ppl"):
        assert tree[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6), key
    rows = [[json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
            for name in ("plain", "tree")]
    assert [r["completion"] for r in rows[0]] == [r["completion"] for r in rows[1]]
    for a, b in zip(*rows):
        assert b["old_logp"] == pytest.approx(a["old_logp"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
def test_vllm_and_the_learner_read_the_same_trajectories(tmp_path):
    """In float32 they give the tokens of every turn the same log-probabilities: both see the same tokens
    before."""
    settings = {k.replace(".", "__"): v for k, v in SMALL.items()} | {
        "rollout__engine": "vllm", "rollout__min_num_seqs": 1, "run__save_every": 0}
    train(load_config(str(EXAMPLES / "guess.toml"), words(tmp_path, **settings)))
    for row in [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]]:
        assert row["turns/mean"] > 1 and row["turns/outside_tokens_mean"] > 0
        assert row["mismatch/max_logp_diff"] < 1e-5
