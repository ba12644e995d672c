"""Two processes with a GPU each learn what one with both does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.processes import said_by_learners
from jaxfp8rl.monitors.jsonl import read_metrics

PROGRAM = Path(__file__).parents[1] / "e2e" / "one_of_several.py"
OPTIONS = [word for key, value in {
    "run.steps": 4, "run.eval_problems": 4, "run.save_every": 2, "sft.steps": 0, "gate.completions": 4,
    "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4, "rollout.kv_cache": "auto",
    "precision.compute_dtype": "bfloat16", "train.fsdp": 2, "train.row_tokens": 128,
    "train.rows_per_microbatch": 2,
    "model.config.hidden_size": 256, "model.config.intermediate_size": 512,
    "model.config.num_attention_heads": 4,
    "model.config.num_key_value_heads": 4,
}.items() for word in (f"--{key}", str(value))]


def run(folder: Path, count: int) -> list[dict]:
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    command = [sys.executable, str(PROGRAM), "nothing", "0", "train", "demo", *OPTIONS,
               "--train.processes", str(count), "--run.dir", str(folder)]
    said_by_learners(command, [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i::count]),
                                "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} for i in range(count)], 400)
    return read_metrics(folder / "metrics.jsonl")


def test_two_processes_are_one(tmp_path):
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True,
                            check=True).stdout.splitlines()
    if min(len(listed), len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(","))) < 2:
        pytest.skip("needs two GPUs")
    one, two = (run(tmp_path / str(count), count) for count in (1, 2))
    assert [m["step"] for m in one] == [m["step"] for m in two] == [0, 1, 2, 3, 4]
    for name in ("reward/mean", "loss", "grad_norm", "mismatch/k3"):
        np.testing.assert_allclose(two[1][name], one[1][name], rtol=1e-3, atol=1e-6, err_msg=name)
