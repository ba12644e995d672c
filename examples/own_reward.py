"""A run from Python with a reward function of your own: the demo's model and task, made small.

The model learns sums from scratch. The reward pays for a right answer, and less for one that is nearly right.
"""

import json
import tempfile
from pathlib import Path

import jaxfp8rl

SMALL = [
    "--run.steps", "3", "--run.eval_every", "3", "--run.eval_problems", "16", "--run.save_every", "0",
    "--gate.completions", "8", "--sft.steps", "25", "--sft.examples_per_step", "32",
    "--train.row_tokens", "40", "--train.rows_per_microbatch", "8", "--rollout.prompts_per_step", "8",
    "--rollout.samples_per_prompt", "4", "--rollout.kv_cache", "auto", "--precision.recipe", "bf16",
    "--model.config.num_hidden_layers", "1", "--task.options.operands", "2",
]


def closeness(problem, text):
    """1 for the right sum, less the further the answer is from it, 0 for what is no number."""
    try:
        return 1 / (1 + abs(int(text) - int(problem.answer)))
    except ValueError:
        return 0.0


def main():
    with tempfile.TemporaryDirectory() as folder:
        run = jaxfp8rl.train("demo", [*SMALL, "--run.dir", f"{folder}/run"], reward=closeness)
        rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    print("mean reward of each step:", *(f"{reward:.3f}" for reward in rewards))


if __name__ == "__main__":  # a process that scores rewards may import this file
    main()
