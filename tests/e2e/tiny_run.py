"""A run of a tiny config, its files, and the comparison of two runs."""

import functools
from pathlib import Path

import jax
import micro_run
import numpy as np
from micro_run import lasting, metrics

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config

TINY = {
    "run.steps": 10, "run.eval_problems": 16, "run.eval_every": 5, "run.save_every": 4,
    "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
    "train.row_tokens": 40, "train.rows_per_microbatch": 1, "train.updates_per_step": 2,
    "model.config.num_hidden_layers": 1, "model.config.intermediate_size": 128,
    "sft.steps": 40, "sft.examples_per_step": 32, "optim.schedule": "constant",
    "task.options.operands": 2, "task.options.demonstration_error": 0.0,
    "task.options.held_out_fraction": 0.3,
}


words, config = (functools.partial(f, of=TINY) for f in (micro_run.words, micro_run.config))


def saved(directory: Path):
    """(state, loop state, step) of the newest checkpoint."""
    cfg = load_config(str(directory / "config.toml"))
    checkpoints = Checkpoints(directory / "checkpoints", 2)
    like = init_state(starting_params(cfg, model_config(cfg)), make_optimizer(cfg.optim, 10))
    state, loop_state = checkpoints.restore(like)
    step = checkpoints.latest()
    return state, loop_state, step


def assert_same_run(directory: Path, straight: Path):
    """Compare every line of metrics without clocks and memory, every sample, and every bit of the final
    state."""
    np.testing.assert_equal(lasting(metrics(directory)), lasting(metrics(straight)))
    assert (directory / "samples.jsonl").read_bytes() == (straight / "samples.jsonl").read_bytes()
    (state, loop_state, step), (want, want_loop, want_step) = saved(directory), saved(straight)
    assert (loop_state, step) == (want_loop, want_step)
    jax.tree.map(np.testing.assert_array_equal, state, want)
