"""A whole step of Qwen3-8B on 1 to 512 GPUs, simulated from measured parts.

    jaxfp8rl bench step_at_scale

Each GPU brings 64 completions, in groups of 8: log-normal lengths, median 1,500 tokens, at most 8,192, those
of a prompt alike. Three ways: "awaited" samples on every GPU, waits for the slowest completion of all, and
learns on all GPUs; "continued" takes what is done and lets the others go on; "apart" samples on one half of
the GPUs while the other half learns.

A decoding step takes A seconds and EACH a row. A is such that one H100 takes the time that was measured
(presets_h100_8b.json). Scoring and updating take their seconds a token there, over the efficiency of that
many GPUs (scaling_plan.json, which is simulated itself, and measured for two and four). Packing spreads the
tokens evenly, so that all GPUs learn from as many. A publish takes the seconds that it took there, and what a
GPU gets over NVLINK. It knows no slow machine, no cold start and no evaluation. The check is a measured step:
one H100's, which gave A and so only checks the sum of the parts, and that of "apart" (async_steps.json).

Needs no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import RESULTS, arguments, row, write
from benchmarks.rollout_tail import EACH, lengths

ROWS, GROUP, LONGEST = 64, 8, 8192
MEASURED_LONGEST = 4096  # tokens: the rollout that was measured goes on until here
COUNTS = (1, 2, 8, 64, 512)
CODES, NVLINK = 8.2e9, 340e9  # bytes of the published weights, and bytes a second of a GPU
DRAWS = 20


class Parts(NamedTuple):
    """Seconds on one H100. a: of a decoding step, whatever its rows. score, update: of a token."""

    a: float
    score: float
    update: float
    publish: float


def parts() -> Parts:
    seen = {r["metric"]: r["ours"] for r in _rows("presets_h100_8b") if r["unit"] == "s"}
    tokens = seen["rollout"] * next(r["yardstick"] for r in _rows("presets_h100_8b")
                                    if r["metric"] == "step" and r["unit"] == "tokens/s")
    return Parts((seen["rollout"] - EACH * tokens) / MEASURED_LONGEST, seen["score"] / tokens,
                 seen["update"] / tokens, seen["publish"])


def efficiencies() -> dict[int, float]:
    """The update's efficiency by the number of GPUs: measured where it was, and otherwise simulated."""
    found = {1: 1.0}
    for r in _rows("scaling_plan"):
        if r["metric"] == "efficiency, simulated" and r["case"].startswith("qwen3-8b"):
            data, _, fsdp = r["case"].rpartition(", ")[2].split()[:3]
            known = r["yardstick_name"] == "measured"
            found[int(data) * int(fsdp)] = r["yardstick"] if known else r["ours"]
    return found


def seconds(x: np.ndarray, how: str, p: Parts, known: dict[int, float]) -> dict[str, float]:
    """A step's parts. x: [GPUs, 64], the lengths of the completions that each GPU brings."""
    gpus, mean = len(x), x.sum() / len(x)
    apart = how == "apart"
    learners = gpus // 2 if apart else gpus
    if how == "awaited":
        rollout = float((p.a * x.max(1) + EACH * x.sum(1)).max())
    else:
        rollout = (p.a / ROWS + EACH) * mean * (gpus / (gpus - learners) if apart else 1)
    of = known[min(n for n in known if n >= learners)]
    learn = (p.score + p.update) * mean * gpus / learners / of
    publish = p.publish + CODES / NVLINK * (1 - 1 / gpus)
    return {"rollout": rollout, "learn": learn, "publish": publish,
            "step": (max(rollout, learn) if apart else rollout + learn) + publish}


def drawn(gpus: int, seed: int) -> np.ndarray:
    return lengths(seed, gpus * ROWS // GROUP, GROUP, most=LONGEST).reshape(gpus, ROWS)


def simulated() -> list[dict]:
    """The mean over DRAWS steps of each way at each number of GPUs. rate: tokens a second of a GPU."""
    p, known, records = parts(), efficiencies(), []
    for how in ("awaited", "continued", "apart"):
        for gpus in COUNTS[how == "apart":]:
            steps = [drawn(gpus, 1000 * seed + gpus) for seed in range(DRAWS)]
            found = [seconds(x, how, p, known) for x in steps]
            mean = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
            records.append({"how": how, "gpus": gpus, **mean, "simulated": True,
                            "rate": float(np.mean([x.sum() for x in steps]) / gpus / mean["step"])})
    return records


def check() -> list[dict]:
    """What the parts make of steps that were measured."""
    of_one = {r["metric"]: r["ours"] for r in _rows("presets_h100_8b") if r["unit"] == "s"}
    halves = next(r for r in _rows("async_steps") if r["yardstick_name"].startswith("sampling alone"))
    return [row("1 GPU, the sum of a step's parts", "step", "s",
                sum(of_one[name] for name in ("rollout", "score", "update", "publish")), of_one["step"],
                "measured"),
            row("learner apart from engines, the longer half", "step", "s", halves["yardstick"],
                halves["ours"], "measured, Qwen3-1.7B, 4 H200")]


def _rows(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def main() -> None:
    args = arguments(__doc__, "step_at_scale").parse_args()
    records = simulated()
    alone = records[0]["rate"]
    rows = check() + [row(f"{r['how']}, {r['gpus']} GPUs", "sampled and learned, simulated",
                          "tokens/s a GPU", r["rate"], alone, "awaited, 1 GPU") for r in records]
    write(args.out, "step_at_scale", rows, args.plot, records=records, parts=parts()._asdict())


if __name__ == "__main__":
    main()
