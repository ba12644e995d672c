"""A run on data in GSM8K's layout, end to end: rows on disk, a warm start, GRPO, evaluation.

The rows are made here, and the model starts from random weights, so that it takes a minute on a CPU. With the
real data set `task.path` is "gsm8k/main/train-*.parquet", and `model.path` a folder with a checkpoint.
"""

import itertools
import json
import tempfile
from pathlib import Path

import jaxfp8rl

CHARACTERS = "\n #+.<=>?" + "0123456789" + "ABHTabcdefghijklmnopqrstuvwxyz"


def rows():
    """Questions, and worked solutions whose last line has the answer behind `####`."""
    for name, thing in itertools.product(("Tom", "Ann", "Ben"), ("pens", "hats", "cups", "nuts")):
        for a, b in itertools.product(range(5), repeat=2):
            yield {"question": f"{name} has {a} {thing} and buys {b}. How many?",
                   "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}


def config(folder):
    """The demo's settings are the rest: FP8 learner, FP8 rollout, the truncated importance weight."""
    options = '{ prompt_field = "question", extract = "last_number", held_out_fraction = 0.2 }'
    settings = {
        "run.dir": f"{folder}/run", "run.steps": 2, "run.eval_every": 2, "run.eval_problems": 16,
        "run.save_every": 0, "gate.completions": 4,
        "model.tokenizer": f"chars:{CHARACTERS}", "model.config.num_hidden_layers": 1,
        "model.config.max_position_embeddings": 96,
        "task.kind": "file", "task.path": f"{folder}/train.jsonl", "task.max_prompt_tokens": 48,
        "task.options": options,
        "rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": 24,
        "train.row_tokens": 72, "train.rows_per_microbatch": 4,
        "sft.steps": 50, "sft.examples_per_step": 32,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def main():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
        run = jaxfp8rl.train("demo", config(folder))
        metrics = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        if "eval/reward_mean" in row:
            print(f"step {row['step']}: {row['eval/reward_mean']:.3f} of the held-out problems are right")


if __name__ == "__main__":
    main()
