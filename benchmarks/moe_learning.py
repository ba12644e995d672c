"""Routing replay on a small mixture of experts, from scratch on CPUs: the mismatch that it removes, and what
is learned.

    jaxfp8rl bench moe_learning [--seeds 3] [--jobs 2] [--keep DIR] [--plot docs/moe-learning.png]

The demo's task with sixteen experts, four of them a token, and the embedded engine. Routers are trained, or
random and fixed (`moe.freeze_router`), which leaves a token's fourth and fifth expert close together. Even so
an FP8 engine here chooses 1% other experts than the learner, where at scale 10% were seen (arXiv 2510.11370).
So the engine may be given perturbed routers: off by Gaussian noise, of a size relative to the weights' own
spread, the same noise in every publish.

`mismatch`: policies 20 steps on, each recipe and size of noise: the share of other experts, and the mismatch
of scoring passes without replay (also that of R2, which replays in the updates alone) and with R3; beside
them one with the learner's choice and the engine's routers, of which only the choice is left. Yardstick: no
replay, the same engine unperturbed. `staleness`: the ratio of an update, pi / pi_old, a few updates later:
with routes of its own, and with those of pi_old (R2). `learning`: fixed random routers. Runs of one seed
begin from the same warm start; held-out reward, greedy, by an engine with exact routers and by the run's own,
with Student's 95% interval over seeds. The yardstick is the BF16 recipe of the same seeds. "Neither" carries
a rejection that never rejects, because no correction at all is refused beside FP8.

What the result file has already is not run again.

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

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, demo_from, row, write
from benchmarks.learning_grid import CORRECTIONS, interval
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
from jaxfp8rl.rollout.pipeline import generate_batch
from jaxfp8rl.rollout.problems import load_data
from jaxfp8rl.training import loop, sft
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.types import Params, TrainBatch

MODEL = {
    "architectures": '["Qwen3MoeForCausalLM"]', "model_type": "qwen3_moe", "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "norm_topk_prob": "true",
}
ROUTERS = {"random": ["--moe.freeze_router", "true"], "trained": []}
BF16 = ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"]
FP8 = ["--precision.recipe", "fp8_rollout", "--rollout.kv_cache", "auto"]
R3 = ["--moe.replay", "R3", "--moe.measure_every", "5"]
TIS, NONE = CORRECTIONS["token_tis"], CORRECTIONS["none"]
NOISE = 0.3  # of the runs with perturbed routers
CASES = {  # name: settings, noise
    "BF16": ([*BF16, *TIS], 0.0),
    "FP8, R3, token TIS": ([*FP8, *R3, *TIS], 0.0),
    "FP8, token TIS": ([*FP8, *TIS], 0.0),
    "FP8, neither": ([*FP8, *NONE], 0.0),
    "FP8 perturbed, R3, token TIS": ([*FP8, *R3, *TIS], NOISE),
    "FP8 perturbed, token TIS": ([*FP8, *TIS], NOISE),
    "FP8 perturbed, neither": ([*FP8, *NONE], NOISE),
    "FP8 perturbed, R3": ([*FP8, *R3, *NONE], NOISE),
}
SIZES, DRAWS = (0.0, 0.1, 0.3, 1.0), 8
PASSES = ("none", "R3", "choice")
SEEN = (
    "reward/mean", "eval/own_engine", "mismatch/k3", "mismatch/k3_unreplayed",
    "mismatch/token_mult_prob_error",
    "routing/disagreement", "routing/tokens_differing", "correction/ess",
)
SCORED, LATER = 20, (1, 4, 16)  # the policy after so many steps, and after so many more


# Runs, each in a process of its own
# ------------------------------------------------------------------------------------


def perturbed(policy: Params, size: float, seed: int) -> Params:
    """The policy with Gaussian noise of `size` times their standard deviation on its routers, in bfloat16 as
    they cross."""
    rng = np.random.default_rng(seed)

    def off(weight: jax.Array) -> jax.Array:
        noise = size * jnp.std(weight) * rng.normal(size=weight.shape)
        return round_to((weight + noise).astype(weight.dtype), "bfloat16")

    gates = [jax.tree.map(off, stack["moe"]["gate"]) for stack in policy["layers"]]
    stacks = (stack | {"moe": stack["moe"] | {"gate": gate}} for stack, gate in zip(policy["layers"], gates))
    return {**policy, "layers": tuple(stacks)}


def warm_start(folder: Path, seed: int, routers: str) -> None:
    """folder/sft/: the policy that the runs of a seed begin with; folder/demo.toml: their config."""
    words = [word for key, value in MODEL.items() for word in (f"--model.config.{key}", str(value))]
    cfg = load_config("demo", ["--run.dir", str(folder), "--run.seed", str(seed), *words, *ROUTERS[routers]])
    model = routing_replay.with_options(model_config(cfg), cfg)
    data = load_data(cfg, model)
    params = sft.warm_start(cfg, model, starting_params(cfg, model), data.task, data.train, data.tokenizer,
                            print)
    save_params(folder / "sft", model, params, dtype=cfg.precision.weight_dtype)
    data.tokenizer.save(folder / "sft")
    (folder / "demo.toml").write_text(demo_from(folder / "sft"))


def learn(folder: Path, seed: int, name: str, words: list[str], noise: float = 0.0) -> None:
    """folder/`name`/: a run. It is evaluated with exact routers, and as `eval/own_engine` with those of its
    engine."""
    publish, evaluate, exact = loop.publish, loop.evaluate, []

    def publish_perturbed(ctx: RunContext, policy: Params, version: int) -> PublishReceipt:
        exact[:] = [policy]
        return publish(ctx, perturbed(policy, noise, seed), version)

    def evaluate_both(ctx: RunContext, version: int) -> dict[str, float]:
        own = evaluate(ctx, version)["eval/reward_mean"]
        publish(ctx, *exact, version)
        found = evaluate(ctx, version)
        publish_perturbed(ctx, *exact, version)
        return {"eval/own_engine": own, **found}

    loop.publish, loop.evaluate = publish_perturbed, evaluate_both
    gate = ["--gate.max_mean_gap", "10", "--gate.max_gap", "100"]  # which would find the noise
    words = ["--sft.steps", "0", "--run.seed", str(seed), "--run.dir", str(folder / name), *gate, *words]
    loop.train(load_config(str(folder / "demo.toml"), words))
    loop.publish, loop.evaluate = publish, evaluate


def compare(folder: Path, seed: int, routers: str) -> None:
    """folder/compared/: BF16 steps, and the records of `mismatches` and `staleness` on their checkpoints as
    found.json."""
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
    """A step's batch by an engine with that policy, and its routes."""
    loop.publish(ctx, engine, version)
    (samples,) = loop.split(generate_batch(ctx, ctx.engine, version, version, Clock()), ctx)
    return loop.pack_samples(ctx, samples)


def mismatches(run: Path, words: list[str]) -> list[dict]:
    """One record a size of noise: means over DRAWS batches, each sampled with its own noise."""
    ctx, policy = with_policy(run, words, SCORED)
    record = routing_replay.make_record(ctx.logprobs, ctx.layout)
    found = []
    for size in SIZES:
        ctx.stream, seen = PromptStream(ctx.train, ctx.cfg.run.seed), []
        for version in range(1, DRAWS + 1):  # the same prompts and seeds at all sizes
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
    """One record a number of updates between pi_old and pi, in BF16 and by unperturbed engines."""
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
    """mismatch_metrics of `logp` beside `other`, by their short names."""
    mask = batch.response_mask
    found = mismatch_metrics(jnp.where(mask, logp - other, 0), logp, other, mask)
    return {name: found[f"mismatch/{name}"] for name in ("k1", "k3", "abs_logp_diff",
                                                         "token_mult_prob_error")}


def means(records: list[dict]) -> dict[str, float]:
    return {name: float(np.mean([r[name] for r in jax.device_get(records)])) for name in records[0]}


# The whole
# -------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments(__doc__, "moe_learning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on a core of its own")
    parser.add_argument("--keep", type=Path, help="where run directories go")
    args = parser.parse_args()
    keep = (args.keep or Path(tempfile.mkdtemp())).absolute()
    # one program is compiled once for all runs
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(keep / "compiled"))
    records = json.loads(args.out.read_text())["records"] if args.out.exists() else {}
    wanted = [("random", name) for name in CASES] + [(routers, f"{routers} routers") for routers in ROUTERS]
    jobs = [(routers, name, seed) for routers, name in wanted for seed in range(args.seeds)
            if str(seed) not in records.get(name, {})]
    one, lock = OneCore(args.jobs), threading.Lock()

    def prepare(routers: str, seed: int) -> None:
        if not (keep / routers / str(seed) / "demo.toml").exists():
            one(warm_start, keep / routers / str(seed), seed, routers)

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
    """Calls a function in a process of its own, on one core of `jobs`. What it prints goes to
    folder/name.log."""

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
            raise SystemExit(f"{log} says why it ended")


def _on_core(core: int, log: Path, function: Callable, *args) -> None:
    os.sched_setaffinity(0, {core})
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        function(*args)


def curve(records: list[dict]) -> dict[str, list]:
    """A run at its evaluations; all but the held-out reward as means over the steps since the last one."""
    steps = [r["step"] for r in records if "eval/reward_mean" in r]
    out = {"step": steps,
           "eval/reward_mean": [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r]}
    for key in SEEN:
        spans = ([r[key] for r in records if a < r["step"] <= b and key in r]
                 for a, b in itertools.pairwise(steps))
        values = [float(f"{statistics.mean(span):.4g}") if span else None for span in spans]
        out |= {key: values} if values[0] is not None else {}
    return out


def rows(records: dict) -> list[dict]:
    """Means over the seeds that are there, as rows of a result file."""
    found = []
    for routers in ROUTERS:
        scored = averaged(records, routers, "mismatch")
        for r in scored:
            exact = next(other for other in scored if other["recipe"] == r["recipe"])
            case = f"{routers} routers, {r['recipe']}, noise {r['noise']:g}"
            share = "routing/disagreement"
            found.append(row(case, share, "share", r[share], exact[share], "unperturbed", True))
            for key, name in itertools.product(("k1", "k3"), PASSES):
                ours, yardstick = r[f"{key} {name}"], exact[f"{key} none"]
                found.append(row(case, f"{key} {name}", "nats", ours, yardstick, "none, unperturbed", True))
        for r in averaged(records, routers, "staleness"):
            for key, unit in {"k3": "nats", "outside": "share"}.items():
                case = f"{routers} routers, {r['updates']:g} updates later"
                found.append(row(case, f"{key} R2", unit, r[f"{key} R2"], r[f"{key} none"], "none", True))
    twin = learned(records, "BF16")
    for name in filter(records.get, CASES):
        for metric, values in learned(records, name).items():
            other = statistics.mean(twin[metric]) if twin else 0.0
            found.append(row(name, metric, "mean over seeds", statistics.mean(values), other, "BF16")
                         | {"interval_95": interval(values), "seeds": len(values)})
    return found


def averaged(records: dict, routers: str, kind: str) -> list[dict]:
    """The records of a kind, means over seeds."""
    alike = zip(*(found[kind] for found in records.get(f"{routers} routers", {}).values()))
    return [same[0] | means([{k: v for k, v in r.items() if k != "recipe"} for r in same]) for same in alike]


def learned(records: dict, name: str) -> dict[str, list[float]]:
    """A case's held-out reward, of each seed; {} where none is there."""
    runs = list(records.get(name, {}).values())
    found = {"held-out reward, end": [run["eval/reward_mean"][-1] for run in runs]}
    found["held-out reward, mean over the run"] = [statistics.mean(run["eval/reward_mean"][1:])
                                                   for run in runs]
    found["held-out reward, own engine, end"] = [run["eval/own_engine"][-1] for run in runs]
    return found if runs else {}


def tables(records: dict) -> str:
    """The tables of docs/moe.md."""
    scored = [["routers", "engine", "noise", "other experts", "tokens", "k1: none", "R3", "choice",
               "k3: none", "R3", "choice"]]
    stale = [["routers", "updates between", "other experts", "k3: none", "R2", "outside: none", "R2"]]
    for routers in ROUTERS:
        for r in averaged(records, routers, "mismatch"):
            shares = (f"{r[f'routing/{key}']:.1%}" for key in ("disagreement", "tokens_differing"))
            nats = (f"{round(r[f'{key} {name}'], 5) + 0:.5f}"
                    for key, name in itertools.product(("k1", "k3"), PASSES))
            scored.append([routers, {"bf16": "BF16", "fp8_rollout": "FP8"}[r["recipe"]], f"{r['noise']:g}",
                           *shares, *nats])
        for r in averaged(records, routers, "staleness"):
            k3, outside = ([r[f"{what} {replay}"] for replay in ("none", "R2")] for what in ("k3", "outside"))
            shares = (f"{x:.2%}" for x in outside)
            stale.append([routers, f"{r['updates']:g}", f"{r['routing/disagreement']:.2%}",
                          *(f"{x:.5f}" for x in k3), *shares])
    runs = [["run", "seeds", "end", "mean over the run", "end, own engine", "k3", "effective sample size"]]
    for name in filter(records.get, CASES):
        of_seeds = list(records[name].values())
        k3, ess = (statistics.mean(statistics.mean(run[key]) for run in of_seeds)
                   for key in ("mismatch/k3", "correction/ess"))
        runs.append([name, str(len(of_seeds)), *map(spread, learned(records, name).values()), f"{k3:.4f}",
                     f"{ess:.3f}"])
    return "\n\n".join(map(markdown, (scored, stale, runs)))


def spread(values: list[float]) -> str:
    """Mean and the half width of its 95% interval, where there is more than one value."""
    bounds = interval(values)
    return f"{statistics.mean(values):.3f}" + (f" ± {(bounds[1] - bounds[0]) / 2:.3f}" if bounds else "")


def markdown(table: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([head, "|---" * len(table[0]) + "|", *body])


def plot(records: dict, path: Path) -> None:
    """Mismatch by share of other experts; held-out reward and mismatch of the runs."""
    from jaxfp8rl.monitors.end.plot import STYLE, plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
        _scored(axes[0], records)
        _runs(axes[1], records, "eval/reward_mean", "Held-out reward, by exact routers")
        _runs(axes[2], records, "mismatch/k3", "mismatch/k3 of the runs (BF16: below)")
        axes[1].set_ylim(0.6, 1.01)
        axes[2].set(yscale="log", ylim=(3e-4, 0.2))
        figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _scored(ax, records: dict) -> None:
    from jaxfp8rl.monitors.end.plot import GREEN, RED

    for routers, replay in itertools.product(ROUTERS, ("none", "R3")):
        found = [r for r in averaged(records, routers, "mismatch") if r["recipe"] == "fp8_rollout"]
        style = {"color": GREEN if replay == "R3" else RED, "ls": "-" if routers == "random" else "--"}
        points = [(100 * r["routing/disagreement"], r[f"k3 {replay}"]) for r in found]
        ax.plot(*zip(*points), **style, marker="o", ms=4, label=f"{routers} routers, {replay}")
    ax.set(title="mismatch/k3 of a scoring pass, FP8", xlabel="% other experts than the engine's",
           xscale="log", yscale="log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend(fontsize=9)


def _runs(ax, records: dict, key: str, title: str) -> None:
    """Mean and range over seeds; dashed: perturbed."""
    from jaxfp8rl.monitors.end.plot import BLUE, GREEN, GREY, RED, VIOLET

    colors = {"R3, token TIS": GREEN, "R3": VIOLET, "token TIS": BLUE, "neither": RED}
    for name in filter(records.get, CASES):
        color = colors.get(name.partition(", ")[2], GREY)
        runs = list(records[name].values())
        values = np.array([run[key] for run in runs])
        steps = runs[0]["step"][-values.shape[1] :]
        ax.plot(steps, values.mean(0), color=color, ls="--" if CASES[name][1] else "-", label=name)
        ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.08, lw=0)
    ax.set(title=title, xlabel="step")


if __name__ == "__main__":
    main()
