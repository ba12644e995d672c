"""The cases of benchmarks/moe_learning.py, and the rows, tables and plot of its records."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import jax
import numpy as np

from benchmarks.common import CORRECTIONS, row
from jaxfp8rl.experiments import statistics as tests

ROUTERS = {"random": ["--moe.freeze_router", "true"], "trained": []}
BF16 = ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"]
FP8 = ["--precision.recipe", "fp8_rollout", "--rollout.kv_cache", "auto"]
R3 = ["--moe.replay", "R3", "--moe.measure_every", "5"]
TIS, NONE = CORRECTIONS["token_tis"], CORRECTIONS["none"]
NOISE = 0.3  # the noise of the runs with perturbed routers
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
PASSES = ("none", "R3", "choice")


def interval(values: list[float]) -> list[float] | None:
    """Student's 95% interval of the mean; None for a single value."""
    return list(tests.interval(values)[1:]) if len(values) > 1 else None


def means(records: list[dict]) -> dict[str, float]:
    return {name: float(np.mean([r[name] for r in jax.device_get(records)])) for name in records[0]}


def rows(records: dict) -> list[dict]:
    """Means over the available seeds, as rows of a result file."""
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
    """The records of a kind, averaged over seeds."""
    alike = zip(*(found[kind] for found in records.get(f"{routers} routers", {}).values()))
    return [same[0] | means([{k: v for k, v in r.items() if k != "recipe"} for r in same]) for same in alike]


def learned(records: dict, name: str) -> dict[str, list[float]]:
    """A case's held-out reward for each seed; {} if there is no record."""
    runs = list(records.get(name, {}).values())
    found = {"held-out reward, end": [run["eval/reward_mean"][-1] for run in runs]}
    found["held-out reward, mean over the run"] = [statistics.mean(run["eval/reward_mean"][1:])
                                                   for run in runs]
    found["held-out reward, own engine, end"] = [run["eval/own_engine"][-1] for run in runs]
    return found if runs else {}


def tables(records: dict) -> str:
    """The tables of docs/notebook_moe.md."""
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
    """The mean and the half width of its 95% interval, if there is more than one value."""
    bounds = interval(values)
    return f"{statistics.mean(values):.3f}" + (f" ± {(bounds[1] - bounds[0]) / 2:.3f}" if bounds else "")


def markdown(table: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in table)
    return "\n".join([head, "|---" * len(table[0]) + "|", *body])


def plot(records: dict, path: Path) -> None:
    """Plot the mismatch against the share of differing experts, and the held-out reward and mismatch of the
    runs."""
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
    """Mean and range over seeds; dashed lines are perturbed engines."""
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
