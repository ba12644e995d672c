"""Routing replay on a small mixture of experts, from scratch on CPUs: the mismatch that it removes, and its
effect on learning.

    jaxfp8rl bench moe_learning [--seeds 3] [--jobs 2] [--keep DIR] [--plot docs/moe-learning.png]

It uses the demo's task with sixteen experts, four per token, and the embedded engine. Routers are trained, or
random and fixed (`moe.freeze_router`), which leaves a token's fourth and fifth expert close together. Even so
an FP8 engine here chooses only 1% other experts than the learner, while 10% were reported at scale (arXiv
2510.11370). The engine can therefore get perturbed routers, with Gaussian noise of a size relative to the
weights' own spread; the noise is the same in every publish.

`mismatch`: policies after 20 steps, for each recipe and size of noise. It reports the share of experts that
differ, and the mismatch of scoring passes without replay (also that of R2, which replays only in the updates)
and with R3. A further pass combines the learner's choice with the engine's routers, so that only the choice
matters. The yardstick is the same unperturbed engine without replay. `staleness`: the ratio of an update,
pi / pi_old, a few updates later, with its own routes and with those of pi_old (R2). `learning`: fixed random
routers; runs of one seed begin from the same warm start. It reports the greedy held-out reward, by an engine
with exact routers and by the run's own engine, with Student's 95% interval over seeds. The yardstick is the
BF16 recipe of the same seeds. "Neither" has a rejection that never rejects, because FP8 without a correction
is refused.

Results that are already in the result file are not run again.

Needs no GPU.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import queue
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, demo_from, write
from benchmarks.moe_tables import BF16, CASES, FP8, PASSES, R3, ROUTERS, means, plot, rows, tables
from bridges.api import PublishReceipt
from jaxfp8rl.checkpoint.read_only import load_trained
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.losses.mismatch import mean_over, mismatch_metrics
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.policy import routing_replay
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.rollout.problems import load_data
from jaxfp8rl.rollout.selected import selected
from jaxfp8rl.training import evaluation, loop, publishing, start, update_batches, warm_start
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.types import Params, TrainBatch

MODEL = {
    "architectures": '["Qwen3MoeForCausalLM"]', "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "norm_topk_prob": "true",
}
SIZES, DRAWS = (0.0, 0.1, 0.3, 1.0), 8
SEEN = (
    "reward/mean", "eval/own_engine", "mismatch/k3", "mismatch/k3_unreplayed",
    "mismatch/token_mult_prob_error",
    "routing/disagreement", "routing/tokens_differing", "correction/ess",
)
SCORED, LATER = 20, (1, 4, 16)  # steps before the policy that is scored, and further updates


# Runs, each in a process of its own
# ------------------------------------------------------------------------------------


def perturbed(policy: Params, size: float, seed: int) -> Params:
    """The policy with Gaussian noise of `size` times their standard deviation on its routers, in bfloat16 as
    they are published."""
    rng = np.random.default_rng(seed)

    def off(weight: jax.Array) -> jax.Array:
        noise = size * jnp.std(weight) * rng.normal(size=weight.shape)
        return round_to((weight + noise).astype(weight.dtype), "bfloat16")

    gates = [jax.tree.map(off, stack["moe"]["gate"]) for stack in policy["layers"]]
    stacks = (stack | {"moe": stack["moe"] | {"gate": gate}} for stack, gate in zip(policy["layers"], gates))
    return {**policy, "layers": tuple(stacks)}


def one_warm_start(folder: Path, seed: int, routers: str) -> None:
    """Create folder/sft/, the initial policy of the runs of a seed, and folder/demo.toml, their config."""
    words = [word for key, value in MODEL.items() for word in (f"--model.config.{key}", str(value))]
    cfg = load_config("demo", ["--run.dir", str(folder), "--run.seed", str(seed),
                               "--precision.recipe", "bf16", *words, *ROUTERS[routers]])
    model = routing_replay.with_options(model_config(cfg), cfg)
    data = load_data(cfg, model)
    params, _ = warm_start.warm_start(cfg, model, starting_params(cfg, model),
                                      (data.task, data.train, data.tokenizer), print, lambda _: None)
    save_params(folder / "sft", model, params, dtype=cfg.precision.weight_dtype)
    data.tokenizer.save(folder / "sft")
    (folder / "demo.toml").write_text(demo_from(folder / "sft"))


def learn(folder: Path, seed: int, name: str, words: list[str], noise: float = 0.0) -> None:
    """Create folder/`name`/, a run. It is evaluated with exact routers, and as `eval/own_engine` with its
    engine's routers."""
    publish, evaluate, exact = publishing.publish, evaluation.evaluate, []

    def publish_perturbed(ctx: RunContext, policy: Params, version: int, **_: Any) -> PublishReceipt:
        exact[:] = [policy]
        return publish(ctx, perturbed(policy, noise, seed), version)

    def evaluate_both(ctx: RunContext, version: int) -> dict[str, float]:
        own = evaluate(ctx, version)["eval/reward_mean"]
        publish(ctx, *exact, version)
        found = evaluate(ctx, version)
        publish_perturbed(ctx, *exact, version)
        return {"eval/own_engine": own, **found}

    publishing.publish = publish_perturbed
    start.evaluate = evaluation.evaluate = evaluate_both
    gate = ["--gate.max_mean_gap", "10", "--gate.max_gap", "100"]  # which would find the noise
    words = ["--sft.steps", "0", "--run.seed", str(seed), "--run.dir", str(folder / name), *gate, *words]
    loop.train(load_config(str(folder / "demo.toml"), words))
    publishing.publish, start.evaluate, evaluation.evaluate = publish, evaluate, evaluate


def compare(folder: Path, seed: int, routers: str) -> None:
    """Create folder/compared/: BF16 steps, with the records of `mismatches` and `staleness` for their
    checkpoints in found.json."""
    run, steps = folder / "compared", SCORED + max(LATER)
    kept = ["--run.save_every", "1", "--run.keep_checkpoints", str(steps), "--run.steps", str(steps),
            "--run.eval_every", "0"]
    learn(folder, seed, run.name, [*BF16, *ROUTERS[routers], *kept])
    found = {"mismatch": mismatches(run, BF16) + mismatches(run, FP8), "staleness": staleness(run)}
    (run / "found.json").write_text(json.dumps(found))


def with_policy(run: Path, words: list[str], step: int) -> tuple[RunContext, Params]:
    trained = load_trained(str(run), step, [*words, *R3])
    ctx = build_run(trained.cfg)
    return ctx, ctx.policy(trained.params)


def sampled(ctx: RunContext, engine: Params, version: int) -> TrainBatch:
    """A step's batch, sampled by an engine with this policy, and its routes."""
    publishing.publish(ctx, engine, version)
    batch = ctx.batches.next_batch(version + 1, Clock())
    (samples,) = update_batches.split(batch, selected(batch, ctx.cfg, version + 1), ctx, version)
    return update_batches.pack_samples(ctx, samples)


def mismatches(run: Path, words: list[str]) -> list[dict]:
    """One record per size of noise: means over DRAWS batches, each sampled with its own noise."""
    ctx, policy = with_policy(run, words, SCORED)
    record = routing_replay.make_record(ctx.logprobs, ctx.layout)
    found = []
    for size in SIZES:
        ctx.stream, seen = PromptStream(ctx.train, ctx.cfg.run.seed), []
        for version in range(1, DRAWS + 1):  # the same prompts and seeds for all sizes
            engine = perturbed(policy, size, version)
            batch = sampled(ctx, engine, version)
            none, own = record(policy, batch._replace(routes=None))
            seen.append(routing_replay.disagreement(own, batch.routes, batch.segment_ids))
            replayed, choice = record(policy, batch)[0], record(engine, batch._replace(routes=own))[0]
            for name, logp in zip(PASSES, (none, replayed, choice)):
                seen[-1] |= {f"{key} {name}": value
                             for key, value in compared(logp, batch.rollout_logp, batch).items()}
        found.append({"recipe": ctx.cfg.precision.recipe, "noise": size, **means(seen)})
    ctx.close()
    return found


def staleness(run: Path) -> list[dict]:
    """One record per number of updates between pi_old and pi, in BF16 with unperturbed engines."""
    ctx, old_policy = with_policy(run, BF16, SCORED)
    record = routing_replay.make_record(ctx.logprobs, ctx.layout)
    batches = [sampled(ctx, old_policy, version) for version in range(1, DRAWS + 1)]
    found = []
    for updates in LATER:
        policy, seen = ctx.policy(load_trained(str(run), SCORED + updates).params), []
        for batch in batches:
            old, routes = record(old_policy, batch._replace(routes=None))
            own, own_routes = record(policy, batch._replace(routes=None))
            seen.append(routing_replay.disagreement(own_routes, routes, batch.segment_ids))
            for name, logp in {"none": own, "R2": record(policy, batch._replace(routes=routes))[0]}.items():
                seen[-1] |= {f"{key} {name}": value for key, value in compared(logp, old, batch).items()}
                outside = jnp.abs(jnp.expm1(logp - old)) > 0.2  # ppo_clip's bounds
                seen[-1][f"outside {name}"] = mean_over(batch.response_mask, outside)
        found.append({"updates": updates, **means(seen)})
    ctx.close()
    return found


def compared(logp, other, batch: TrainBatch) -> dict[str, jax.Array]:
    """mismatch_metrics of `logp` against `other`, under their short names."""
    mask = batch.response_mask
    found = mismatch_metrics(jnp.where(mask, logp - other, 0), logp, other, mask)
    return {name: found[f"mismatch/{name}"] for name in ("k1", "k3", "abs_logp_diff",
                                                         "token_mult_prob_error")}


# The whole
# ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments(__doc__, "moe_learning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on a core of its own")
    parser.add_argument("--keep", type=Path, help="where run directories go")
    args = parser.parse_args()
    keep = (args.keep or Path(tempfile.mkdtemp())).absolute()
    # each program is compiled once for all runs
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(keep / "compiled"))
    records = json.loads(args.out.read_text())["records"] if args.out.exists() else {}
    wanted = [("random", name) for name in CASES] + [(routers, f"{routers} routers") for routers in ROUTERS]
    jobs = [(routers, name, seed) for routers, name in wanted for seed in range(args.seeds)
            if str(seed) not in records.get(name, {})]
    one, lock = OneCore(args.jobs), threading.Lock()

    def prepare(routers: str, seed: int) -> None:
        if not (keep / routers / str(seed) / "demo.toml").exists():
            one(one_warm_start, keep / routers / str(seed), seed, routers)

    def job(routers: str, name: str, seed: int) -> None:
        folder = keep / routers / str(seed)
        # of a run that was cut off
        shutil.rmtree(folder / (name if name in CASES else "compared"), ignore_errors=True)
        if name in CASES:
            (words, noise), steps = CASES[name], str(args.steps)
            words = [*words, *ROUTERS[routers], "--run.steps", steps, "--run.eval_every",
                     str(args.steps // 10)]
            one(learn, folder, seed, name, [*words, "--run.save_every", "0"], noise)
            found = curve(read_metrics(folder / name / "metrics.jsonl"))
        else:
            one(compare, folder, seed, routers)
            found = json.loads((folder / "compared" / "found.json").read_text())
        with lock:
            records.setdefault(name, {})[str(seed)] = found
            write(args.out, "moe_learning", rows(records), records=records)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda start: prepare(*start), sorted({(routers, seed) for routers, _, seed in jobs})))
        list(pool.map(lambda j: job(*j), jobs))
    print(tables(records))
    if args.plot:
        plot(records, args.plot)


class OneCore:
    """Calls a function in its own process, on one core of `jobs`. Its output goes to folder/name.log."""

    def __init__(self, jobs: int):
        self._cores = queue.SimpleQueue()
        for core in sorted(os.sched_getaffinity(0))[:jobs]:
            self._cores.put(core)

    def __call__(self, function: Callable, folder: Path, seed: int, *rest) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{function.__name__} {rest[0]}.log"
        core = self._cores.get()
        process = multiprocessing.get_context("spawn").Process(
            target=_on_core, args=(core, log, function, folder, seed, *rest))
        process.start()
        process.join()
        self._cores.put(core)
        if process.exitcode:
            raise SystemExit(f"{log} has the reason")


def _on_core(core: int, log: Path, function: Callable, *args) -> None:
    os.sched_setaffinity(0, {core})
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        function(*args)


def curve(records: list[dict]) -> dict[str, list]:
    """A run at its evaluations; all metrics but the held-out reward are means over the steps since the last
    evaluation."""
    steps = [r["step"] for r in records if "eval/reward_mean" in r]
    out = {"step": steps,
           "eval/reward_mean": [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r]}
    for key in SEEN:
        spans = ([r[key] for r in records if a < r["step"] <= b and key in r]
                 for a, b in itertools.pairwise(steps))
        values = [float(f"{statistics.mean(span):.4g}") if span else None for span in spans]
        out |= {key: values} if values[0] is not None else {}
    return out


if __name__ == "__main__":
    main()
