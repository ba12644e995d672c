"""A whole experiment: two recipes at two seeds from shared warm starts, ended in these and in its cells, gone
on with, and its page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import until
from jaxfp8rl.cli.main import main
from jaxfp8rl.experiments.results import read_results

PROTOCOL = """\
question = "Does one FP8 policy learn small sums as BF16 does?"
hypothesis = "It does."
refuted_by = "A difference outside the margin."
config = "demo"
seeds = [0, 1]
control = { recipe = "bf16" }

[settings]
run = { eval_every = 2, eval_problems = 16, save_every = 1, keep_checkpoints = 1 }
rollout = { prompts_per_step = 4, samples_per_prompt = 4, kv_cache = "auto" }
train = { row_tokens = 40, rows_per_microbatch = 4 }
optim = { schedule = "constant", warmup_steps = 0 }
task.options = { max_operand = 9, operands = 2, held_out_fraction = 0.3 }

[warm_start]
sft = { steps = 200, examples_per_step = 32, warmup_steps = 5, save_every = 20 }

[grid.recipe]
bf16 = { precision.recipe = "bf16" }
fp8 = { precision.recipe = "fp8_unified" }

[budget]
steps = 6
minutes = 10

[outcome]
margin = 0.5

[pilot]
seeds = [10]
"""


@pytest.mark.slow  # ten processes that start JAX; tests/unit/experiments/test_runner.py has them pretend
def test_an_experiment_is_killed_gone_on_with_and_reported(tmp_path, capsys, quick_children):
    protocol, work = tmp_path / "sums.toml", tmp_path / "work"
    protocol.write_text(PROTOCOL)
    words = ["experiment", "run", str(protocol), "--work", str(work), "--jobs", "2"]
    assert "goes on from update" in ended(words, work, "warm/*/sft_checkpoints/*/digests.json")
    said = ended(words, work, "cells/*/checkpoints/2")
    assert ": started, from update" in said and "goes on from step" in said
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "from step" in out and "4 of 4 cells are done" in out
    assert main(words) == 0 and capsys.readouterr().out == "4 of 4 cells are done\n"
    assert len(list(work.glob("warm/*/sft"))) == 2
    check_lines(tmp_path / "results" / "sums")
    page = tmp_path / "page.md"
    assert main(["experiment", "report", str(protocol), "--out", str(page)]) == 0
    assert re.search(r"`fp8` is \w+.* `bf16` at the end: [+-]0\.\d{3} \(.*\), 2 seeds\.", page.read_text())
    assert (tmp_path / "page-curves.png").is_file() and (tmp_path / "page-differences.png").is_file()


def ended(words: list[str], work: Path, when: str) -> str:
    """The output of the command, which is told to end when the path `when` exists."""
    command = subprocess.Popen([sys.executable, "-m", "jaxfp8rl", *words], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"JAX_PLATFORMS": "cpu"})
    until(lambda: list(work.glob(when)) or command.poll() is not None, 200)
    command.send_signal(signal.SIGTERM)
    said, _ = command.communicate()
    assert command.returncode == 143
    return said


def check_lines(folder: Path) -> None:
    """Every step stands there once, each seed has its own start, and the lines are few."""
    found = {r.header["cell"]: r for r in read_results(folder)}
    assert set(found) == {"bf16-s0", "bf16-s1", "fp8-s0", "fp8-s1"}
    for result in found.values():
        assert [step["step"] for step in result.steps] == list(range(7))
        assert [s["step"] for s in result.steps if "eval/reward_mean" in s] == [0, 2, 4, 6]
        assert result.header["seconds"] > 1 and result.header["device"].endswith("cores")
        assert json.loads(json.dumps(result.header)) == result.header
    assert found["bf16-s0"].steps[1]["entropy"] != found["bf16-s1"].steps[1]["entropy"]
    assert max(path.stat().st_size for path in folder.iterdir()) < 5000
