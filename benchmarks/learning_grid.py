"""Many runs of small models: the mismatch of engine and learner by recipe, and the effect of each recipe and
correction on learning.

    jaxfp8rl bench learning_grid [--part mismatch|learning|both|wgrad|sums] [--seeds 3] [--jobs 6]

Every run is `jaxfp8rl train` on the demo in its own process, several at once on one GPU; runs of one seed
begin from the same warm start. `mismatch`: vLLM with CUDA graphs, recipe x cache; medians over the steps
(`--cpu`: vLLM's CPU build, W8A16, on a machine with AMX). `learning`: the embedded engine, recipe x
correction; held-out reward at the end, and its mean over the run, with Student's 95% interval over seeds. The
yardstick is the BF16 recipe of the same seeds. An FP8 recipe requires a correction, so "none" has a rejection
that never rejects. `wgrad`: the embedded engine, fp8_unified with each value of precision.wgrad_inputs; the
yardstick is "1x128". `sums`: the embedded engine, with each value of optim.gradient_sums, 15 micro-batches an
update; the yardstick is "float32".

Needs no GPU; one for its speed, vLLM for --part mismatch.
"""

from __future__ import annotations

import argparse
import math
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
CORRECTIONS = {
    "none": ["--correction.preset", "none", "--correction.allow_uncorrected_fp8", "true"],
    "token_tis": ["--correction.preset", "token_tis"],
    "sequence_tis": ["--correction.preset", "sequence_tis"],
    "geometric_mask": ["--correction.preset", "geometric_mask"],
}
WGRAD = "1x128", "128x128"
SUMS = "float32", "bfloat16"
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("mismatch", "learning", "both", "wgrad", "sums"), default="both")
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
    common = ["--precision.compute_dtype", args.compute, "--run.steps", str(args.steps)]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: warm_start(args, seed), range(args.seeds)))
    if args.part in ("mismatch", "both"):
        mismatch(args, common)
    if args.part in ("learning", "both"):
        learning(args, common)
    if args.part == "wgrad":
        wgrad(args, common)
    if args.part == "sums":
        sums(args, common)


def warm_start(args, seed: int) -> None:
    run = args.keep / f"sft{seed}"
    if not (run / "sft").exists():
        words = ["--precision.compute_dtype", args.compute, "--run.seed", str(seed), "--run.dir", str(run)]
        child(["sft", "demo", *words])
    (args.keep / f"demo{seed}.toml").write_text(demo_from(run / "sft"))


def mismatch(args, common: list[str]) -> None:
    cases = {f"{recipe}, {kv} KV": ["--precision.recipe", recipe, "--rollout.kv_cache",
                                    {"BF16": "auto", "FP8": "fp8"}[kv]]
             for recipe in RECIPES for kv in ("BF16", "FP8")}
    vllm = ["--rollout.engine", "vllm"]
    vllm += [] if args.cpu else ["--rollout.gpu_memory_utilization", "0.08", "--rollout.kv_cache_gib", "4"]
    records = run_all(args, {name: [*common, *vllm, *words] for name, words in cases.items()}, "mismatch")
    rows = []
    for name in cases:
        twin = f"fp8_rollout, {name.split(', ')[1]}"
        for key in ("mismatch/k3", "mismatch/token_mult_prob_error", "mismatch/abs_logp_diff"):
            ours, other = (median_of(records.get(n, {}), key) for n in (name, twin))
            if ours is not None and other is not None:
                rows.append(row(name, key, "median over steps and seeds", ours, other, twin, True))
    keys = ("mismatch/k3", "mismatch/token_mult_prob_error")
    medians = {n: {s: {k: seed_median(r, k) for k in keys} for s, r in by.items()}
               for n, by in records.items()}
    name = "mismatch_cpu" if args.cpu else "mismatch"
    write(args.out / f"{name}.json", name, rows, problems=problems(args, "mismatch", records),
          medians=medians)


def learning(args, common: list[str]) -> None:
    plain = ["--rollout.kv_cache", "auto"]
    cases = {f"{recipe}, {name}": ["--precision.recipe", recipe, *words, *(plain if recipe == "bf16" else [])]
             for recipe in RECIPES for name, words in CORRECTIONS.items()
             if recipe != "bf16" or name in ("none", "token_tis")}
    compare_learning(args, {name: [*common, *words] for name, words in cases.items()}, "learning_grid",
                     "bf16, token_tis")


def wgrad(args, common: list[str]) -> None:
    cases = {blocks: [*common, "--precision.recipe", "fp8_unified", "--precision.wgrad_inputs", blocks]
             for blocks in WGRAD}
    compare_learning(args, cases, "wgrad_inputs", WGRAD[0])


def sums(args, common: list[str]) -> None:
    common = [*common, "--train.rows_per_microbatch", "6"]
    cases = {dtype: [*common, "--optim.gradient_sums", dtype] for dtype in SUMS}
    compare_learning(args, cases, "gradient_sums", SUMS[0])


def compare_learning(args, cases: dict[str, list[str]], result: str, yardstick: str) -> None:
    """Write the learning results of each case, averaged over seeds, against the case `yardstick`."""
    part = "learning" if result == "learning_grid" else result
    records = run_all(args, cases, part)
    finals = {n: {s: evals(r)[-1] for s, r in by.items()} for n, by in records.items()}
    means = {n: {s: statistics.mean(evals(r)[1:]) for s, r in by.items()} for n, by in records.items()}
    rows = []
    for metric, found in (("held-out reward, end", finals), ("held-out reward, mean over the run", means)):
        twin = found[yardstick]
        for name, by_seed in found.items():
            if by_seed and twin:
                mean, other = statistics.mean(by_seed.values()), statistics.mean(twin.values())
                rows.append(row(name, metric, "mean over seeds", mean, other, yardstick)
                            | {"interval_95": interval(list(by_seed.values())), "seeds": len(by_seed)})
    starts = {n: {s: evals(r)[0] for s, r in by.items()} for n, by in records.items()}
    errors = {n: {s: seed_median(r, "mismatch/token_mult_prob_error") for s, r in by.items()}
              for n, by in records.items()}
    write(args.out / f"{result}.json", result, rows, problems=problems(args, part, records), finals=finals,
          means=means,
          starts=starts, mismatch=errors)


def run_all(args, cases: dict[str, list[str]], part: str) -> dict[str, dict[int, list[dict]]]:
    """The records of the finished runs, by case and seed."""

    def one(job: tuple[str, int]) -> None:
        name, seed = job
        child(["train", str(args.keep / f"demo{seed}.toml"), *cases[name], "--run.seed", str(seed),
               "--sft.steps", "0",
               "--run.dir", str(folder(args, part, name, seed))])

    jobs = [(name, seed) for seed in range(args.seeds) for name in cases]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, jobs))
    out: dict[str, dict[int, list[dict]]] = {name: {} for name in cases}
    for name, seed in jobs:
        path = folder(args, part, name, seed) / "metrics.jsonl"
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


def folder(args, part: str, name: str, seed: int) -> Path:
    return args.keep / f"{part}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def seed_median(records: list[dict], key: str) -> float:
    return statistics.median(r[key] for r in records if r["step"] > 0)


def median_of(by_seed: dict[int, list[dict]], key: str) -> float | None:
    return statistics.median(seed_median(r, key) for r in by_seed.values()) if by_seed else None


def evals(records: list[dict]) -> list[float]:
    return [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r]


def interval(values: list[float]) -> list[float] | None:
    """Student's 95% interval of the mean."""
    if len(values) not in STUDENT_95:
        return None
    half = STUDENT_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.mean(values) - half, statistics.mean(values) + half]


def problems(args, part: str, records: dict[str, dict[int, list[dict]]]) -> dict[str, str]:
    """The end of the log of each run that did not finish, by case and seed."""
    missing = {f"{n}, seed {s}": folder(args, part, n, s) for n, by in records.items()
               for s in range(args.seeds) if s not in by}
    return {name: last_error(Path(f"{path}.log")) for name, path in missing.items()}


def last_error(log: Path) -> str:
    lines = log.read_text().splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.startswith("jaxfp8rl: ")),
                lines[-1] if lines else "no log")


if __name__ == "__main__":
    main()
