"""An asynchronous run on two served engines, SIGKILLed at 20 random moments: replicas and the learner, 18
times on stand-ins of `vllm serve`, twice on `vllm serve` itself. Nothing may be lost.

    jaxfp8rl bench kills [--folder runs/kills]    # a quarter of an hour, CPU

What is killed is resumed, or returns, until the run is done. Then another run is given all that the first has
recorded, and nothing is killed in it: it must come to the same masters, metrics and samples, bit for bit.
Every line of metrics that was written before a kill must be the same after it, every group that was admitted
must be known, every completion that was learned from must be whole, and no engine may outlive its learner.

Needs no GPU.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "bridges"))

from random_kills import cost, planned

from benchmarks.common import arguments, row, write

RUNS = {"in flight": (18, 20, "stand-ins"), "vllm": (2, 6, "vllm serve")}  # kills, steps, engines
ENVIRONMENT = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def rows_of(case: str, found: dict, kills: int) -> list[dict]:
    """What happened beside what was planned, and what is left beside what there was."""
    all_of = lambda what, unit: row(case, f"{what}, the same in the replayed run", unit, sum(found[what]),
                                    len(found[what]), "without a kill")
    none_of = lambda what, n, unit: row(case, what, unit, n, 0, "none", smaller_is_better=True)
    return [
        row(case, "SIGKILLs", "kills", len(found["kills"]), kills, "planned"),
        all_of("arrays", "arrays"), all_of("metrics", "lines"), all_of("samples", "lines"),
        row(case, "metrics written before a kill, the same after it", "lines", sum(found["told before"]),
            len(found["told before"]), "before"),
        none_of("groups lost", found["groups"]["lost"], "groups"),
        none_of("completions learned from before they were done", found["groups"]["short"], "completions"),
        none_of("engines left behind", found["engines left"], "processes"),
    ]


def main() -> None:
    parser = arguments(__doc__, "kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"),
                        help="where the runs lie; made afresh")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    shutil.rmtree(args.folder, ignore_errors=True)
    rows, told = [], {}
    for kind, (kills, steps, engines) in RUNS.items():
        found = cost(args.folder / kind.replace(" ", "-"), kind, steps,
                     planned(kind, kills, steps, args.seed))
        case = f"{steps} steps on two {engines}"
        rows += rows_of(case, found, kills)
        told[case] = {"log": found["log"], "groups": found["groups"]}
        write(args.out, "kills", rows, args.plot, seed=args.seed, runs=told)
    if any(r["ours"] != r["yardstick"] for r in rows):
        raise SystemExit("the killed run is not the one that was replayed, or something was lost")


if __name__ == "__main__":
    main()
