"""A protocol of two arms and two seeds, and lines of its cells without any run."""

from __future__ import annotations

from pathlib import Path

from jaxfp8rl.experiments.cells import Cell
from jaxfp8rl.experiments.protocol import Experiment, load_protocol
from jaxfp8rl.experiments.results import DONE, write_result
from jaxfp8rl.monitors.jsonl import JsonlMonitor
from jaxfp8rl.run.provenance import write_about

SMALL = """\
question = "Does B learn as A does?"
hypothesis = "It does."
refuted_by = "A difference outside the margin."
config = "demo"
seeds = [0, 1, 2]
control = { recipe = "bf16" }

[settings]
run = { eval_every = 2, save_every = 1, eval_problems = 8 }
optim.warmup_steps = 0
sft.steps = 0
rollout.kv_cache = "auto"

[grid.recipe]
bf16 = { precision.recipe = "bf16" }
fp8 = { precision.recipe = "fp8_unified" }

[budget]
steps = 4
minutes = 5

[outcome]
margin = 0.1
alpha = 0.05

[pilot]
seeds = [10, 11]
"""


def small(folder: Path, *changes: tuple[str, str]) -> Experiment:
    """The protocol in `folder`, with texts replaced."""
    text = SMALL
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "small.toml").write_text(text)
    return load_protocol(str(folder / "small.toml"))


def lines(experiment: Experiment, cell: Cell, work: Path, rewards: dict[int, float], ended: str = DONE,
          seconds: float = 60.0) -> Path:
    """The committed lines of a cell whose evaluations gave `rewards`, by step."""
    run = work / cell.name
    monitor = JsonlMonitor(run / "metrics.jsonl")
    for step in range(max(rewards) + 1):
        of_a_step = {"time/step_s": 30.0, "tokens/rollout": 1e5} if step else {}
        record = {"step": step, "unread": 1.0} | of_a_step
        monitor.log(record | ({"eval/reward_mean": rewards[step]} if step in rewards else {}))
    monitor.close()
    write_about(run, {"hardware": "1 x NVIDIA H100", "commit": "abc1234", "versions": {"jax": "0.11.2"},
                      "date": "2026-11-26 12:00 UTC"})
    path = experiment.results / f"{cell.name}.jsonl"
    write_result(path, experiment, cell, run, ended, seconds, 2)
    return path
