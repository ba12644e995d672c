"""Policies learn from random weights, in turns, what one turn cannot do: `examples/guess.toml` and
`calculator.toml`, each beside itself with one turn.

    jaxfp8rl bench turns [--folder runs/turns]    # three minutes on two idle cores

Each is a run of its own, with its compilations. `seconds` is its wall clock, and `cpu_seconds` what it and
its processes took of all cores, which tells a busy machine from a slow run.

Needs no GPU.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from jaxfp8rl.monitors.jsonl import read_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"
ALONE = {"guess": 1 / 7, "calculator": 1 / 3}  # the most that one turn can get
LAST = 5  # steps whose mean is the reward at the end


def learned(name: str, folder: Path, *words: str) -> dict:
    """The rewards of a run by step, and what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "jaxfp8rl.cli.main", "train", EXAMPLES / f"{name}.toml",
                    "--run.dir", folder,
                    *words], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
                   stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rewards = [r["reward/mean"] for r in read_metrics(folder / "metrics.jsonl") if "reward/mean" in r]
    return {"rewards": rewards, "seconds": time.monotonic() - began,
            "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def rows_of(name: str, turns: dict, single: dict) -> list[dict]:
    end = lambda run: sum(run["rewards"][-LAST:]) / LAST
    most = ALONE[name]
    return [
        row(name, f"reward of the last {LAST} of {len(turns['rewards'])} steps", "reward", end(turns), most,
            "the most that one turn can get"),
        row(name, "reward of the first step", "reward", turns["rewards"][0], most,
            "the most that one turn can get"),
        row(name, "learned with one turn", "reward", end(single), most, "the most that one turn can get"),
        row(name, "time", "s", turns["seconds"], 90.0, "half of three minutes", smaller_is_better=True),
        row(name, "time of all cores", "CPU s", turns["cpu_seconds"], 180.0,
            "two cores for half of three minutes",
            smaller_is_better=True),
    ]


def main() -> None:
    parser = arguments(__doc__, "turns")
    parser.add_argument("--folder", type=Path, default=Path("runs/turns"),
                        help="where the runs lie; made afresh")
    args = parser.parse_args()
    rows, curves = [], {}
    for name in ALONE:
        turns = learned(name, args.folder / name)
        single = learned(name, args.folder / f"{name}-single", "--environment.max_turns", "1", "--run.steps",
                         "40")
        curves[name] = {"turns": turns, "single": single}
        rows += rows_of(name, turns, single)
        write(args.out, "turns", rows, args.plot, curves=curves)


if __name__ == "__main__":
    main()
