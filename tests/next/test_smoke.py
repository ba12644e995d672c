"""`make smoke-next`: with the next release of JAX a run samples, learns and publishes, and says that it
is untested. The same target lowers one form of every kernel for CUDA."""

from __future__ import annotations

import jax
import pytest

from jaxfp8rl.cli.main import main
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.tested import BY_NAME

TINY = {
    "run.steps": 1, "run.eval_problems": 16, "run.save_every": 1, "sft.steps": 0,
    "rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 2,
    "train.row_tokens": 40, "train.rows_per_microbatch": 1,
    "loss.entropy_coef": 0.01,  # a gradient, though no answer is right yet
}


@pytest.mark.skipif(BY_NAME["jax"].includes(jax.__version__), reason="the whole suite runs with this JAX")
def test_a_run_takes_a_step_and_says_that_its_jax_is_untested(quick_compile, tmp_path, capsys):
    words = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    assert main(["train", "demo", "--run.dir", str(tmp_path / "run"), *words]) == 0
    said = f"jax {jax.__version__} has not been tested"
    assert said in capsys.readouterr().out and said in (tmp_path / "run" / "notes.txt").read_text()
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 < last["grad_norm"] < 10 and 0.99 < last["mismatch/token_mult_prob_error"] < 1.01
