"""`jaxfp8rl eval`: pass@k of a checkpoint on the problems that its task holds out, with confidence intervals.

A completion passes when its reward is at least a threshold; one without a score fails. pass@k of a problem is
the chance that one of k completions passes, estimated without bias from n >= k of them, of which c passed, as
1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1); of a task it is the mean over its
problems.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxfp8rl.checkpoint.read_only import Trained, load_trained
from jaxfp8rl.config.overrides import parse_overrides
from jaxfp8rl.errors import CheckpointError, ConfigError, DataError, check_writable
from jaxfp8rl.monitors.end.evaluations import locked, read_evaluations, write_evaluations
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.training import loop
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.resume import unseen_by

RESAMPLES = 10_000


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
    """Print the table of `source`, a run directory or a config, and add it to the list in the JSON file
    `out`, for a run its eval.json; the answer to the same question is replaced.

    samples: completions a problem, by default the largest k. greedy: one each, the likeliest. seed: of
    sampling alone, by default run.seed. Raises UserErrors before anything is sampled, DataError for problems
    that the run was trained on among them, GateFailed and BridgeErrors as training does.
    """
    n = samples or (1 if greedy else max(ks))
    if max(ks) > n or (greedy and n > 1):
        what = "of greedy completions there is one" if greedy else f"--samples {n} is less than --k {max(ks)}"
        raise ConfigError(f"pass@{max(ks)} cannot be estimated: {what}",
                          "--k 1 with --greedy, else --samples of at least k")
    path = Path(out) if out else Path(source) / "eval.json" if Path(source).is_dir() else None
    if path:
        recorded(path)  # what is no list of evaluations is refused before anything is sampled
    trained = load_trained(source, step, overrides)
    with contextlib.closing(build_run(trained.cfg)) as ctx:
        check_held_out(ctx, trained, source)
        seed = trained.cfg.run.seed if seed is None else seed
        passed, facts = sample(ctx, trained, n, greedy, threshold, seed)
        found = summary(ctx, trained, passed, n, ks) | {"seed": seed, "greedy": greedy,
                                                          "threshold": threshold, **facts}
    found["overrides"] = {".".join(override.path): override.value for override in parse_overrides(overrides)}
    how = "greedy" if greedy else f"{n} sampled at temperature {found['temperature']:g}"
    print(f"step {found['step']}: {found['problems']} held-out problems, {how}, by {found['engine']}")
    print(
        f"gate: learner and engine {found['gate/mean_gap']:.3g} nats apart on average, {found['gate/max_gap']:.3g} at most")
    Console(highlight=False).print(table(found))
    if path:
        with locked(path):  # read anew: another evaluation may have ended meanwhile
            write_evaluations(path, [record for record in recorded(path)
                                     if _question(record) != _question(found)] + [found])
        print(f"wrote {path}")


def check_held_out(ctx: RunContext, trained: Trained, source: str) -> None:
    """Raise DataError where the run was trained on a problem that is held out here; say so where it just
    never met them."""
    if not trained.loop:
        return
    if "contents" not in trained.loop:
        return print(
            "an earlier version wrote this checkpoint: it does not say whether these problems were held out")
    if trained.loop["tokenizer"] != ctx.tokenizer.fingerprint():
        raise CheckpointError("model.tokenizer: the run was trained with another vocabulary",
                              "evaluate it with the same one")
    if trained.loop["contents"] == ctx.contents:
        return
    unseen_by(Path(source), trained.loop, ctx)
    if len(ctx.questions.held_out):
        print(
            f"these are not the run's own held-out problems: of {len(ctx.questions.held_out)} it was trained on none")


def sample(
    ctx: RunContext, trained: Trained, n: int, greedy: bool, threshold: float, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """(how many of `n` completions passed [P], for each held-out problem; the gate's numbers, their mean
    reward, how many had no score, and how many groups were unfit). Those without a score, and those of an
    unfit group, have failed. Raises DataError when none is held out."""
    if not ctx.held_out:
        raise DataError("the task holds no problems out",
                        "task.held_out_path, or task.options.held_out_fraction")
    print(*ctx.stops.notes, sep="\n", end="\n" if ctx.stops.notes else "")
    facts = publish_and_gate(ctx, trained)
    sampling = ctx.greedy if greedy else dataclasses.replace(ctx.sampling, support=0)
    requests = scored_groups.make_requests(ctx.held_out, sampling, n, seed, loop.EVAL_STEP + trained.step)
    kept, rejected = scored_groups.generate(ctx.engine, ctx.held_out, requests, version=trained.step,
                                            cut=ctx.stops.cut)
    place, rewards = {r.request_id: i for i, r in enumerate(requests)}, np.full((len(requests), n), np.nan)
    groups = scored_groups.score(kept, ctx.tokenizer, ctx.rewards, ctx.cfg.task.think_tags)
    for group in groups:
        rewards[place[group.completions[0].request_id]] = group.rewards
    undefined = int(np.isnan(rewards).sum()) - len(rejected) * n
    counts = {"reward_mean": float(np.nan_to_num(rewards).mean()), "undefined": undefined,
              "groups_rejected": len(rejected)}
    counts |= scored_groups.named_means(groups, 0.0)
    return (rewards >= threshold).sum(1), facts | counts


def publish_and_gate(ctx: RunContext, trained: Trained) -> dict[str, float]:
    """Publish the checkpoint and pass the gate as a run does -> the gate's numbers."""
    trained = dataclasses.replace(trained, params=ctx.layout.place(trained.params))
    if ctx.kv_scales:
        if not trained.loop.get("kv_amax"):
            raise CheckpointError("rollout.kv_scales: the checkpoint has not calibrated any yet",
                                  '--rollout.kv_scales one')
        ctx.kv_scales.amax = {name: jnp.asarray(x, jnp.float32)
                                for name, x in trained.loop["kv_amax"].items()}
    policy = loop.with_scales(ctx, ctx.policy(trained.params))
    _, policy = loop.sync_weights(ctx, trained, policy, trained.step)
    return loop.gate(ctx, policy, trained.step)


def summary(ctx: RunContext, trained: Trained, passed: np.ndarray, n: int,
            ks: Sequence[int]) -> dict[str, Any]:
    """What a record of eval.json says. passed [P]."""
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
    """passed [P] int, of n completions each -> the unbiased estimate of each problem [P], float64, exact but
    for one rounding."""
    ways = math.comb(n, k)
    return np.array([1 - math.comb(n - int(c), k) / ways for c in passed])


def interval(estimates: np.ndarray) -> Interval:
    """The mean of [P] estimates in [0, 1] with its 95% interval over problems.

    Where each is 0 or 1, so with n = k = 1 and when all problems agree: Wilson's (1927) of a share. Else the
    percentile bootstrap over problems (Efron and Tibshirani 1993, chapter 13).
    """
    from scipy import stats  # it takes a second to load

    mean, count = float(estimates.mean()), len(estimates)
    if np.isin(estimates, (0.0, 1.0)).all():
        low, high = stats.binomtest(int(estimates.sum()), count).proportion_ci(method="wilson")
        return Interval(mean, float(low), float(high), "wilson")
    # drawing problems is drawing how many have each value; scipy's bootstrap refuses a single problem
    values, counts = np.unique(estimates, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(count, counts / count, size=RESAMPLES)
    low, high = np.quantile(drawn @ values / count, (0.025, 0.975))
    return Interval(mean, float(low), float(high), "bootstrap")


def table(found: dict[str, Any]) -> Table:
    """For the terminal."""
    shown = Table("", "estimate", "95% interval", "")
    shown.add_row("mean reward", f"{found['reward_mean']:.3f}", "", "")
    for k, x in found["pass_at_k"].items():
        shown.add_row(f"pass@{k}", f"{x['estimate']:.3f}", f"{x['low']:.3f} to {x['high']:.3f}", x["method"])
    for key, what in (("undefined", "completions without a score: failed"),
                      ("groups_rejected", "problems given up: failed")):
        if found[key]:
            shown.add_row(what, str(found[key]), "", "")
    return shown


def recorded(path: Path) -> list[dict[str, Any]]:
    """The records that the file `path` has, none where there is no file. Raises ConfigError for a place that
    cannot be written to and DataError for a file that is damaged or another's: all before anything is
    sampled."""
    if path.is_dir() or not path.parent.is_dir():
        why = f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"--out {path}: {why}", "name a file in a folder that is there")
    try:
        found = read_evaluations(path) if path.exists() else []
    except ValueError as e:
        raise DataError(f"{path} is no list of evaluations, and is not overwritten: {e}",
                        "take it away, or name another with --out") from e
    check_writable(path.parent)
    return found


def _question(record: dict[str, Any]) -> tuple[Any, ...]:
    """What was asked; a record that answers the same is an older one."""
    asked = ("run", "step", "samples", "seed", "greedy", "threshold", "overrides")
    return *(record.get(key) for key in asked), *record["pass_at_k"]
