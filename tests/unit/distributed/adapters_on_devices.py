"""A run of adapters on two virtual devices against the same on one. It runs as a program, because JAX creates
the devices when it starts."""

import sys
from pathlib import Path

import numpy as np
from micro_run import rewarded
from tiny_run import config, metrics

from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import loop

LORA = {
    "sft__steps": 0, "lora__rank": 4, "lora__dtype": "float32", "optim__lr": 0.02, "optim__warmup_steps": 0,
    "precision__recipe": "bf16", "run__save_every": 0, "train__updates_per_step": 1, "run__steps": 2,
    "train__rows_per_microbatch": 2,
}


def found(folder: Path, **own: int) -> np.ndarray:
    """[steps, 3]: loss, norm of the gradients and mismatch."""
    loop.train(config(folder, **LORA, **own))
    return np.array([[row[name] for name in ("loss", "grad_norm", "mismatch/k3")]
                     for row in metrics(folder)[1:]])


if __name__ == "__main__":
    RewardRunner.score = rewarded
    here, (name,) = Path(sys.argv[1]), sys.argv[2:]
    one, two = found(here / "one"), found(here / "two", **{f"train__{name}": 2})
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-6)
    print("equal")
