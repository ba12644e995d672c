"""Whole steps beside TRL: one GPU, one model, one batch, each trainer in a child process of its own.

    jaxfp8rl bench beside_trl [--shape Qwen3-1.7B] [--preset qwen3-1.7b-h100] [--prompts 8] [--samples 8]
        [--tokens 2048] [--steps 4] [--microbatch 4] [--no-liger] [--models FOLDER] [--section.key VALUE ...]

The model's folder has random weights (`jaxfp8rl random-model`). A step samples prompts x samples completions
of up to --tokens tokens and makes one update of them. Ours runs the preset as it stands but for the batch.
TRL's GRPOTrainer computes in BF16, with vLLM colocated and asleep while it learns, gradient checkpointing,
truncated importance sampling and Liger's kernels. Random weights solve nothing: TRL rewards a completion by
its tokens, ours by its length. TRL's completions have no end; ours end early about once a step.

The first update: seconds from the command to its end, less the median rollout of the later steps. A step: the
median of the steps after the second. Caches are those of HOME: an empty folder makes a cold start. Then our
run starts again, with the caches that it left, and ends after its first update. Options with a dot are
settings of our run. The yardstick of every row is TRL, started once.

Needs a GPU and vLLM; trl, and Liger's kernels unless --no-liger.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.presets import CHANGED, keep, run, train
from benchmarks.trl_settings import grpo_settings, title
from jaxfp8rl.cli.random_model import random_model

PROMPT = 256  # tokens, at the most


class Steps(NamedTuple):
    """Seconds of a trainer: from the command to the end of each step, and of each step's rollout."""

    ends: list[float]
    rollouts: list[float]

    def first(self) -> float:
        return self.ends[0] - statistics.median(self.rollouts[1:])

    def one(self) -> float:
        """A step that compiles nothing."""
        return statistics.median(b - a for a, b in zip(self.ends[1:], self.ends[2:]))

    def beside_rollout(self) -> float:
        return self.one() - statistics.median(self.rollouts[2:])


def main() -> None:
    parser = arguments(__doc__, "beside_trl")
    parser.add_argument("--shape", default="Qwen3-1.7B", help="default: %(default)s")
    parser.add_argument("--preset", default="qwen3-1.7b-h100", help="default: %(default)s")
    for name, size in {"prompts": 8, "samples": 8, "tokens": 2048, "steps": 4, "microbatch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    parser.add_argument("--models", type=Path, metavar="FOLDER",
                        help="where the model's folder is kept; default: it is deleted")
    parser.add_argument("--no-liger", action="store_true", help="TRL without Liger's kernels")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of a trainer: %(default)s")
    parser.add_argument("--child", type=Path, metavar="FILE.json", help=argparse.SUPPRESS)
    args, settings = parser.parse_known_args()
    if args.child:
        return learn_with_trl(**json.loads(args.child.read_text()))
    if args.steps < 3:
        sys.exit("benchmarks/beside_trl.py: --steps 3 at the least: the first two compile")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.models or scratch, args.shape)
        if not folder.exists():
            print(random_model(args.shape, folder), flush=True)
        theirs = steps_of_trl(args, folder, Path(scratch))
        ours = steps_of_ours(args, folder, Path(scratch, "run"), settings)
        again = steps_of_ours(args, folder, Path(scratch, "again"), settings, first_alone=True)
    case = f"{args.shape}, {args.prompts * args.samples} x {args.tokens:,} tokens"
    name = title(liger=not args.no_liger)
    figures = {"first update": Steps.first, "step": Steps.one, "step but its rollout": Steps.beside_rollout,
               "rollout": lambda s: statistics.median(s.rollouts[2:])}
    rows = [row(case, what, "s", of(ours), of(theirs), name, True) for what, of in figures.items()]
    warm = again.ends[0] - statistics.median(ours.rollouts[1:])
    rows.append(row(case, "first update, started again", "s", warm, theirs.first(), f"{name}, started once",
                    True))
    write(args.out, "beside_trl", rows, args.plot, ours=ours._asdict(), again=again._asdict(),
          trl=theirs._asdict())


def steps_of_ours(args: argparse.Namespace, folder: Path, into: Path, settings: list[str],
                  first_alone: bool = False) -> Steps:
    options = [*CHANGED, "--model.path", str(folder), "--run.steps", str(args.steps),
               "--rollout.prompts_per_step", str(args.prompts), "--rollout.samples_per_prompt",
               str(args.samples), "--rollout.max_new_tokens", str(args.tokens), "--rollout.max_num_seqs",
               str(args.prompts * args.samples), "--loss.overlong_buffer", str(args.tokens), *settings]
    log = args.out.with_name(f"{args.out.stem}_{into.name}.log")
    most = 2 if first_alone else float("inf")  # lines of metrics: of the start, and of the first step
    seen = run(train(args.preset, into, options), into, args.timeout, lambda: None, log, most)
    keep(log, into)
    if seen.code and not (first_alone and len(seen.records) >= most):
        sys.exit("\n".join(["our run failed", *seen.console[-30:]]))
    steps = [(at, record) for at, record in zip(seen.times, seen.records) if record["step"] > 0]
    return Steps([at for at, _ in steps], [record["time/rollout_s"] for _, record in steps])


def steps_of_trl(args: argparse.Namespace, folder: Path, scratch: Path) -> Steps:
    config = grpo_settings(
        scratch / "trl", steps=args.steps, prompts=args.prompts, samples=args.samples, tokens=args.tokens,
        prompt_tokens=PROMPT, microbatch=args.microbatch, liger=not args.no_liger, learning_rate=1e-6,
        vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.4, generation_kwargs={"ignore_eos": True},
        model_init_kwargs={"dtype": "bfloat16"},
    )
    file = scratch / "trl.json"
    file.write_text(json.dumps({"model": str(folder), "prompts": args.prompts * args.steps, "config": config,
                                "times": str(scratch / "times.json")}))
    began = time.monotonic()
    command = [sys.executable, __file__, "--child", str(file)]
    child = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           timeout=args.timeout)
    if child.returncode:
        sys.exit(f"TRL failed\n{child.stdout[-8000:]}")
    found = json.loads((scratch / "times.json").read_text())
    return Steps([end - began for end in found["ends"]], found["rollouts"])


def learn_with_trl(model: str, prompts: int, config: dict[str, Any], times: str) -> None:
    """Train with GRPOTrainer, in the child process, and write when each step ended (CLOCK_MONOTONIC, seconds)
    and how long its rollouts took."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    found: dict[str, list[float]] = {"ends": [], "rollouts": []}

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            found["ends"].append(time.monotonic())
            Path(times).write_text(json.dumps(found))

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    texts = [f"Make {n} of the numbers {n + 3}, {n + 7} and 4." for n in range(prompts)]
    data = Dataset.from_dict({"prompt": texts})
    trainer = GRPOTrainer(model=model, reward_funcs=reward, args=GRPOConfig(**config), train_dataset=data,
                          callbacks=[Clock()])
    generate = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        result = generate(*args, **kwargs)
        found["rollouts"].append(time.monotonic() - start)
        return result

    trainer._generate = timed
    trainer.train()


if __name__ == "__main__":
    main()
