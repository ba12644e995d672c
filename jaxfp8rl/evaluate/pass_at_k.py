"""`jaxfp8rl eval`: pass@k of a checkpoint on the held-out problems of its task, with confidence intervals.

A completion passes if its reward is at least a threshold; a completion without a score fails. pass@k of a
problem is the probability that at least one of k completions passes. Its unbiased estimate from n >= k
completions, of which c passed, is 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1).
pass@k of a task is the mean over its problems.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxfp8rl.checkpoint.read_only import Trained, config_of, read_trained
from jaxfp8rl.config.overrides import parse_overrides
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import CheckpointError, ConfigError, DataError, check_writable
from jaxfp8rl.memory.cache import with_cache
from jaxfp8rl.memory.fit import explained_evaluation
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.evaluations import locked, read_evaluations, write_evaluations
from jaxfp8rl.monitors.quiet import FOLDER as LOGS
from jaxfp8rl.monitors.quiet import quiet
from jaxfp8rl.policy.adapters import check_digest
from jaxfp8rl.policy.warnings import version_warnings
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.gpu_memory import share_gpu
from jaxfp8rl.rollout.watched import Watched
from jaxfp8rl.training import gate, publishing
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.evaluation import EVAL_STEP
from jaxfp8rl.training.resume import unseen_by

RESAMPLES = 10_000
EVALUATE = "evaluate"  # the phase that samples, as training calls it


class Interval(NamedTuple):
    """An estimate with the ends of its 95% confidence interval."""

    estimate: float
    low: float
    high: float
    method: str


def run_eval(
    source: str, ks: Sequence[int] = (1,), samples: int | None = None, step: int | None = None,
    greedy: bool = False,
    threshold: float = 1.0, out: str | None = None, overrides: Sequence[str] = (), seed: int | None = None,
) -> None:
    """Evaluate `source`, a run directory or a config: print the table and add a record to the JSON file
    `out`.

    `out` is by default the run's eval.json. A record of the same evaluation is replaced. samples: completions
    a problem, by default the largest k. greedy: one greedy completion a problem. seed: for sampling only, by
    default run.seed. Raises UserErrors before anything is sampled, DataError if the run was trained on a
    held-out problem, and GateFailed and BridgeErrors as training does.
    """
    n = samples or (1 if greedy else max(ks))
    if max(ks) > n or (greedy and n > 1):
        why = "--greedy gives one completion" if greedy else f"--samples {n} is less than --k {max(ks)}"
        raise ConfigError(f"pass@{max(ks)} cannot be estimated: {why}",
                          "use --k 1 with --greedy, or --samples of at least k")
    path = Path(out) if out else Path(source) / "eval.json" if Path(source).is_dir() else None
    if path:
        recorded(path)  # refuses a file that is not a list of evaluations before anything is sampled
    cfg, is_run = config_of(source, step, overrides), Path(source).is_dir()
    share_gpu(cfg)  # before anything asks JAX for its devices
    cfg, of_cache = with_cache(without_draft_head(cfg), fresh=False)
    cfg = with_rows(cfg, n * cfg.run.eval_problems)
    with (quiet(Path(source) / LOGS / "stderr.txt" if is_run and not out else None),
          explained_evaluation(cfg, is_run) as others,
          contextlib.closing(ConsoleMonitor(cfg.run.eval_problems, of="problem")) as console):
        for note in filter(None, (*version_warnings(cfg), of_cache, others)):
            console.note(note)
        console.phase("loading the checkpoint" if is_run else "loading the model")
        trained = read_trained(cfg, source, step)
        with contextlib.closing(build_run(cfg, phase=console.phase)) as ctx:
            check_held_out(ctx, trained, source)
            seed = cfg.run.seed if seed is None else seed
            passed, facts = sample(ctx, trained, n, greedy, threshold, seed, console)
            found = summary(ctx, trained, passed, n, ks) | {"seed": seed, "greedy": greedy,
                                                              "threshold": threshold, **facts}
    found["overrides"] = {".".join(override.path): override.value for override in parse_overrides(overrides)}
    how = "greedy" if greedy else f"{n} sampled at temperature {found['temperature']:g}"
    print(f"step {found['step']}: {found['problems']} held-out problems, {how}, by {found['engine']}")
    print(f"gate: learner and engine differ by {found['gate/mean_gap']:.3g} nats on average, "
          f"{found['gate/max_gap']:.3g} at most")
    Console(highlight=False).print(table(found))
    if path:
        with locked(path):  # read again, since another evaluation may have ended in the meantime
            write_evaluations(path, [record for record in recorded(path)
                                     if _question(record) != _question(found)] + [found])
        print(f"wrote {path}")


def check_held_out(ctx: RunContext, trained: Trained, source: str) -> None:
    """Raise DataError if the run was trained on a problem that is held out here.

    Print a note if these are other held-out problems than the run's own.
    """
    if not trained.loop:
        return
    if "contents" not in trained.loop:
        return print(
            "an earlier version wrote this checkpoint without recording whether these problems were held out")
    if trained.loop["tokenizer"] != ctx.tokenizer.fingerprint():
        raise CheckpointError("model.tokenizer: the run was trained with another vocabulary",
                              "evaluate it with the same tokenizer")
    if trained.loop["contents"] == ctx.contents:
        return
    unseen_by(Path(source), trained.loop, ctx)
    if len(ctx.questions.held_out):
        print(
            f"these are not the run's own held-out problems, but it was trained on none of the "
            f"{len(ctx.questions.held_out)}")


def sample(
    ctx: RunContext, trained: Trained, n: int, greedy: bool, threshold: float, seed: int,
    console: ConsoleMonitor,
) -> tuple[np.ndarray, dict[str, float]]:
    """Sample `n` completions of each held-out problem -> (passed, facts). The console shows the progress.

    passed: the number of completions that passed, [P] int. facts: the gate's metrics, the mean reward, and
    the numbers of completions without a score and of rejected groups. Completions without a score and those
    of rejected groups have failed. Raises DataError if no problem is held out.
    """
    if not ctx.held_out:
        raise DataError("the task holds out no problems",
                        "set task.held_out_path or task.options.held_out_fraction")
    print(*ctx.stops.notes, sep="\n", end="\n" if ctx.stops.notes else "")
    during = Clock(console.phase)
    facts = publish_and_gate(ctx, trained, during)
    sampling = ctx.greedy if greedy else dataclasses.replace(ctx.sampling, support=0)
    requests = scored_groups.make_requests(ctx.held_out, sampling, n, seed, EVAL_STEP + trained.step)
    with during(EVALUATE):
        watched = Watched(ctx.player, functools.partial(console.bar, EVALUATE))
        kept, rejected = scored_groups.generate(watched, ctx.held_out, requests, version=trained.step,
                                                cut=ctx.stops.cut)
    place, rewards = {r.request_id: i for i, r in enumerate(requests)}, np.full((len(requests), n), np.nan)
    with during("score"):
        groups = scored_groups.score(kept, ctx.tokenizer, ctx.rewards, ctx.cfg.task.think_tags)
    for group in groups:
        rewards[place[group.completions[0].request_id]] = group.rewards
    undefined = int(np.isnan(rewards).sum()) - len(rejected) * n
    counts = {"reward_mean": float(np.nan_to_num(rewards).mean()), "undefined": undefined,
              "groups_rejected": len(rejected)}
    counts |= scored_groups.named_means(groups, 0.0)
    return (rewards >= threshold).sum(1), facts | counts


def publish_and_gate(ctx: RunContext, trained: Trained, during: Clock) -> dict[str, float]:
    """Publish the checkpoint and pass the gate, as a run does -> the gate's metrics."""
    trained = dataclasses.replace(trained, params=ctx.layout.place(trained.params))
    if ctx.kv_scales:
        if not trained.loop.get("kv_amax"):
            raise CheckpointError("rollout.kv_scales: the checkpoint was saved before scales were calibrated",
                                  'use --rollout.kv_scales one')
        ctx.kv_scales.amax = {name: jnp.asarray(x, jnp.float32)
                                for name, x in trained.loop["kv_amax"].items()}
    if ctx.base and trained.loop:
        check_digest(ctx.base["digest"], trained.loop["base"]["digest"], trained.cfg.run.dir)
    with during("publish"):
        policy = publishing.with_scales(ctx, ctx.policy(trained.params))
        _, policy = publishing.sync_weights(ctx, trained, policy, trained.step)
    with during("gate"):
        return gate.gate(ctx, policy, trained.step)


def with_rows(cfg: Config, completions: int) -> Config:
    """The config, with as many rows of an embedded engine as an evaluation of so many completions can use: a
    run has those of a step."""
    if cfg.rollout.engine != "jax":
        return cfg
    at_once = min(cfg.rollout.max_num_seqs, completions)
    return cfg.having("rollout", min_num_seqs=max(at_once, cfg.rollout.min_num_seqs))


def without_draft_head(cfg: Config) -> Config:
    """The config without a draft head, which changes no completion and is not among the weights."""
    if cfg.rollout.speculation != "head":
        return cfg
    defaults = {key: Rollout.model_fields[key].default for key in ("speculation", "draft_tokens", "draft_lr")}
    return cfg.having("rollout", **defaults)


def summary(ctx: RunContext, trained: Trained, passed: np.ndarray, n: int,
            ks: Sequence[int]) -> dict[str, Any]:
    """A record of eval.json. passed: [P] int."""
    cfg, engine = trained.cfg, ctx.engine.capabilities()
    return {
        "run": cfg.run.dir, "step": trained.step, "task": cfg.task.kind, "name": cfg.task.name,
        "problems": len(passed), "samples": n,
        "temperature": cfg.rollout.temperature, "top_k": cfg.rollout.top_k, "top_p": cfg.rollout.top_p,
        "engine": f"{engine.engine} {engine.engine_version}", "weights": engine.formats.weights,
        "kv_cache": engine.formats.kv_cache,
        "pass_at_k": {str(k): interval(pass_at_k(passed, n, k))._asdict() for k in sorted(set(ks))},
        "passed": [[prompt.problem.id, int(count)] for prompt, count in zip(ctx.held_out, passed)],
    }


def pass_at_k(passed: np.ndarray, n: int, k: int) -> np.ndarray:
    """passed [P] int, out of n completions each -> the unbiased estimate of each problem [P] float64.

    Integer arithmetic keeps each estimate exact up to one rounding.
    """
    ways = math.comb(n, k)
    return np.array([1 - math.comb(n - int(c), k) / ways for c in passed])


def interval(estimates: np.ndarray) -> Interval:
    """The mean of [P] estimates in [0, 1] with its 95% interval over problems.

    If each estimate is 0 or 1 (as with n = k = 1), it is Wilson's interval for a proportion (1927). Otherwise
    it is the percentile bootstrap over problems (Efron and Tibshirani 1993, chapter 13).
    """
    from scipy import stats  # slow to import

    mean, count = float(estimates.mean()), len(estimates)
    if np.isin(estimates, (0.0, 1.0)).all():
        low, high = stats.binomtest(int(estimates.sum()), count).proportion_ci(method="wilson")
        return Interval(mean, float(low), float(high), "wilson")
    # resampling problems is drawing the count of each value; scipy's bootstrap refuses a single problem
    values, counts = np.unique(estimates, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(count, counts / count, size=RESAMPLES)
    low, high = np.quantile(drawn @ values / count, (0.025, 0.975))
    return Interval(mean, float(low), float(high), "bootstrap")


def table(found: dict[str, Any]) -> Table:
    """The results as a table for the terminal."""
    shown = Table("", "estimate", "95% interval", "")
    shown.add_row("mean reward", f"{found['reward_mean']:.3f}", "", "")
    for k, x in found["pass_at_k"].items():
        shown.add_row(f"pass@{k}", f"{x['estimate']:.3f}", f"{x['low']:.3f} to {x['high']:.3f}", x["method"])
    for key, label in (("undefined", "completions without a score: failed"),
                       ("groups_rejected", "problems rejected: failed")):
        if found[key]:
            shown.add_row(label, str(found[key]), "", "")
    return shown


def recorded(path: Path) -> list[dict[str, Any]]:
    """The records in the file `path`; none if it does not exist.

    Raises ConfigError if it cannot be written, and DataError if it is damaged or not a list of evaluations.
    """
    if path.is_dir() or not path.parent.is_dir():
        why = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"--out {path}: {why}", "name a file in an existing folder")
    try:
        found = read_evaluations(path) if path.exists() else []
    except ValueError as e:
        raise DataError(f"{path} is not a list of evaluations and is not overwritten: {e}",
                        "remove it, or name another file with --out") from e
    check_writable(path.parent)
    return found


def _question(record: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of an evaluation. A new record replaces an older one with the same arguments."""
    keys = ("run", "step", "samples", "seed", "greedy", "threshold", "overrides")
    return *(record.get(key) for key in keys), *record["pass_at_k"]
