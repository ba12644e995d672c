"""A run of a tiny config, its files, and the comparison of two runs."""

from pathlib import Path

import jax
import numpy as np

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.monitors.jsonl import read_metrics
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


def words(directory: Path, **changes) -> list[str]:
    """Command-line overrides: TINY with changes, "__" for the dot."""
    settings = TINY | {"run.dir": str(directory)} | {k.replace("__", "."): v for k, v in changes.items()}
    return [w for k, v in settings.items() for w in (f"--{k}", str(v))]


def config(directory: Path, **changes) -> Config:
    return load_config("demo", words(directory, **changes))


def metrics(directory: Path) -> list[dict]:
    return read_metrics(directory / "metrics.jsonl")


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

    def without_clocks(rows: list[dict]) -> list[dict]:
        return [{k: v for k, v in r.items() if not k.startswith(("time/", "memory/")) and "per_s" not in k}
                for r in rows]

    np.testing.assert_equal(without_clocks(metrics(directory)), without_clocks(metrics(straight)))
    assert (directory / "samples.jsonl").read_bytes() == (straight / "samples.jsonl").read_bytes()
    (state, loop_state, step), (want, want_loop, want_step) = saved(directory), saved(straight)
    assert (loop_state, step) == (want_loop, want_step)
    jax.tree.map(np.testing.assert_array_equal, state, want)
