"""The mismatch of engine and learner by recipe, on many runs of the demo.

    jaxfp8rl bench mismatch [--cpu] [--seeds 3] [--jobs 6]

Every run is `jaxfp8rl train` on the demo in its own process, several at once on one GPU; runs of one seed
begin from the same warm start. vLLM with CUDA graphs, recipe x cache; medians over the steps (`--cpu`: vLLM's
CPU build, W8A16, on a machine with AMX). What each recipe learns is asked by experiments
(experiments/adder.toml, docs/experiments.md).

Needs vLLM; a GPU for its speed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import RESULTS, demo_from, row, write
from jaxfp8rl.monitors.jsonl import read_metrics

ROOT = Path(__file__).parent.parent
RECIPES = ("bf16", "fp8_rollout", "fp8_unified")
KEYS = "mismatch/k3", "mismatch/token_mult_prob_error", "mismatch/abs_logp_diff"
CASES = {f"{recipe}, {kv} KV": ["--precision.recipe", recipe, "--rollout.kv_cache", value]
         for recipe in RECIPES for kv, value in (("BF16", "auto"), ("FP8", "fp8"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=6, help="number of concurrent runs")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--cpu", action="store_true",
                        help="vLLM's CPU build: results go to mismatch_cpu.json")
    parser.add_argument("--compute", default="bfloat16", help="float type of the learner")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--keep", type=Path, default=None, help="where the run directories go")
    args = parser.parse_args()
    args.keep = args.keep or Path(tempfile.mkdtemp())
    args.out, args.keep = args.out.absolute(), args.keep.absolute()
    args.keep.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: warm_start(args, seed), range(args.seeds)))
    mismatch(args)


def warm_start(args, seed: int) -> None:
    run = args.keep / f"sft{seed}"
    if not (run / "sft").exists():
        words = ["--precision.recipe", "bf16", "--precision.compute_dtype", args.compute,
                 "--run.seed", str(seed), "--run.dir", str(run)]
        child(["sft", "demo", *words])
    (args.keep / f"demo{seed}.toml").write_text(demo_from(run / "sft"))


def mismatch(args) -> None:
    records = run_all(args)
    rows = []
    for name in CASES:
        twin = f"fp8_rollout, {name.split(', ')[1]}"
        for key in KEYS:
            ours, other = (median_of(records[n], key) for n in (name, twin))
            if ours is not None and other is not None:
                rows.append(row(name, key, "median over steps and seeds", ours, other, twin, True))
    medians = {n: {s: {k: seed_median(r, k) for k in KEYS[:2]} for s, r in by.items()}
               for n, by in records.items()}
    name = "mismatch_cpu" if args.cpu else "mismatch"
    write(args.out / f"{name}.json", name, rows, problems=problems(args, records), medians=medians)


def run_all(args) -> dict[str, dict[int, list[dict]]]:
    """The records of the finished runs, by case and seed."""
    common = ["--precision.compute_dtype", args.compute, "--run.steps", str(args.steps), "--sft.steps", "0",
              "--rollout.engine", "vllm"]
    common += [] if args.cpu else ["--rollout.gpu_memory_utilization", "0.08", "--rollout.kv_cache_gib", "4"]

    def one(job: tuple[str, int]) -> None:
        name, seed = job
        child(["train", str(args.keep / f"demo{seed}.toml"), *common, *CASES[name], "--run.seed", str(seed),
               "--run.dir", str(folder(args, name, seed))])

    jobs = [(name, seed) for seed in range(args.seeds) for name in CASES]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, jobs))
    out: dict[str, dict[int, list[dict]]] = {name: {} for name in CASES}
    for name, seed in jobs:
        path = folder(args, name, seed) / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        if records and records[-1]["step"] == args.steps:
            out[name][seed] = records
    return out


def child(words: list[str]) -> None:
    name = words[words.index("--run.dir") + 1]
    # each program is compiled once for all runs
    cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(name).parent / "compiled")}
    with open(f"{name}.log", "w") as log:
        words = [sys.executable, "-m", "jaxfp8rl", *words]
        subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | cache)


def folder(args, name: str, seed: int) -> Path:
    return args.keep / f"mismatch-{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def seed_median(records: list[dict], key: str) -> float:
    return statistics.median(r[key] for r in records if r["step"] > 0)


def median_of(by_seed: dict[int, list[dict]], key: str) -> float | None:
    return statistics.median(seed_median(r, key) for r in by_seed.values()) if by_seed else None


def problems(args, records: dict[str, dict[int, list[dict]]]) -> dict[str, str]:
    """The end of the log of each run that did not finish, by case and seed."""
    missing = {f"{n}, seed {s}": folder(args, n, s) for n, by in records.items()
               for s in range(args.seeds) if s not in by}
    return {name: last_error(Path(f"{path}.log")) for name, path in missing.items()}


def last_error(log: Path) -> str:
    lines = log.read_text().splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.startswith("jaxfp8rl: ")),
                lines[-1] if lines else "no log")


if __name__ == "__main__":
    main()
