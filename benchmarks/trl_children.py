"""The children of benchmarks/trl_learns.py: `learn` is TRL, and `judge` evaluates what it saved.

    python benchmarks/trl_children.py learn|judge FILE.json    # the arguments of the function
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxfp8rl.config.toml import load_config


def judge(config: str, folders: list[tuple[str, int, str]], out: str) -> None:
    """Publish the weights of each (seed, step, folder) to one engine, and evaluate them as a cell does.
    Writes judged.json."""
    from jaxfp8rl.checkpoint.read_only import load_trained
    from jaxfp8rl.evaluate.pass_at_k import publish_and_gate
    from jaxfp8rl.memory.cache import with_cache
    from jaxfp8rl.monitors.clock import Clock
    from jaxfp8rl.run.provenance import hardware
    from jaxfp8rl.training.context import build_run
    from jaxfp8rl.training.evaluation import evaluate

    first, scores, seen = load_trained(config), {}, {}
    with contextlib.closing(build_run(with_cache(first.cfg, fresh=False)[0])) as ctx:
        for version, (seed, step, folder) in enumerate(folders):
            if folder not in seen:  # the weights of step 0 are those of all seeds
                trained = load_trained(config, overrides=["--model.path", folder])
                publish_and_gate(ctx, dataclasses.replace(trained, step=version), Clock())
                seen[folder] = {k: v for k, v in evaluate(ctx, version).items() if k.startswith("eval/")}
                print(f"seed {seed}, step {step}: {seen[folder]}", flush=True)
            scores.setdefault(seed, {})[step] = seen[folder]
    Path(out, "judged.json").write_text(json.dumps({"device": hardware(), "scores": scores}))


def learn(config: str, trainer: dict[str, Any], lock: str, out: str) -> None:
    """Train with GRPOTrainer, which is built while this process has the file `lock`. Write how long it waited
    for that, when the first step began (CLOCK_MONOTONIC, seconds), and the record of each step."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from jaxfp8rl.optim.schedule import make_schedule
    from jaxfp8rl.policy.shapes import model_config
    from jaxfp8rl.rewards.runner import RewardRunner
    from jaxfp8rl.rollout.problems import load_data
    from jaxfp8rl.rollout.scored_groups import THINK_TOKENS
    from jaxfp8rl.verifiers.scorers import thinks_on

    cfg = load_config(config)
    data = load_data(cfg, model_config(cfg))
    scorer = RewardRunner(data.task, cfg.task.reward_timeout_s, cfg.task.reward_workers)
    scorer.wait_until_ready()
    stream, tokenizer = data.stream(cfg), data.tokenizer
    prompts = [p for _ in range(cfg.run.steps) for p in stream.next(cfg.rollout.prompts_per_step)]
    opened = [thinks_on(tokenizer.decode(p.token_ids[-THINK_TOKENS:], False), cfg.task.think_tags)
              for p in prompts]
    rates = make_schedule(cfg.optim, cfg.updates)
    begun = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    found: dict[str, Any] = {"steps": [], "begun": begun}
    record: dict[str, float] = {}

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.monotonic()

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            rate, ours = optimizer.param_groups[0]["lr"], float(rates(state.global_step))
            if abs(rate - ours) > 1e-4 * ours:
                at = f"update {state.global_step + 1}"
                raise ValueError(f"{at}: TRL learns at a rate of {rate}, we at {ours}")
            self.began = now()
            found.setdefault("first", self.began)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            found["steps"].append({"step": state.global_step, **record, "time/step_s": now() - self.began})

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            found["steps"][-1] |= {k: logs[k] for k in ("grad_norm", "entropy") if k in logs}
            Path(out).write_text(json.dumps(found))

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float | None]:
        texts = [opened[i] + tokenizer.completion_text(ids) for i, ids in zip(index, completion_ids)]
        scores = [s.value for s in scorer.score([(prompts[i].problem, t) for i, t in zip(index, texts)])]
        lengths = [len(ids) for ids in completion_ids]
        record.update({"reward/mean": statistics.fmean(s for s in scores if s is not None),
                       "response/length_mean": statistics.fmean(lengths), "tokens/rollout": sum(lengths)})
        return scores

    asked = [text if isinstance(text := p.problem.prompt, str) else list(text) for p in prompts]
    rows = Dataset.from_dict({"prompt": asked, "index": list(range(len(prompts)))})
    with Path(lock).open("w") as file:
        since = time.monotonic()
        fcntl.flock(file, fcntl.LOCK_EX)
        found["waited"] = time.monotonic() - since
        made = GRPOTrainer(model=cfg.model.path, reward_funcs=reward, args=GRPOConfig(**trainer),
                           train_dataset=rows, callbacks=[Clock()])
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that vLLM forked may hold the file, too
    theirs = made._tokenize_prompts(asked)[0]
    for p, ids in zip(prompts, theirs, strict=True):
        if tuple(ids) != tuple(p.token_ids):
            raise ValueError(f"{p.problem.id}: TRL's prompt has other tokens\n{ids}\n{list(p.token_ids)}")
    if set(made.eos_token_ids) != set(data.stops.token_ids):
        raise ValueError(f"TRL ends a completion at the tokens {made.eos_token_ids}, we at "
                         f"{data.stops.token_ids}")
    made.train()
    scorer.close()


if __name__ == "__main__":
    {"learn": learn, "judge": judge}[sys.argv[1]](**json.loads(Path(sys.argv[2]).read_text()))
