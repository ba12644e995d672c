"""Stands for `jaxfp8rl train` and `sft` in tests of the runner: it writes what a run writes, in milliseconds.

FAKE in the environment is JSON: seconds of the start (starts_s), whether it waits after step 1 until it is
asked to end (waits), whether it hangs then, with a process of its own (deaf), whether a warm start waits
after update 1 (warm_waits), and for the names of run directories the exit code with which they end after step
2 (ends).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

FAKE = json.loads(os.environ.get("FAKE", "{}"))


def main(command: str, source: str, *options: str) -> int:
    path = Path(source)
    cfg = tomllib.loads((path / "config.toml" if path.is_dir() else path).read_text())
    run, stop = Path(cfg["run"]["dir"]), []
    print(f"{command} {run.name} {' '.join(options)} on {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
    time.sleep(FAKE.get("starts_s", 0.0))
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    if command == "sft":
        return warm_start(run, bool(options), stop)
    if not options:
        run.mkdir(parents=True)
        (run / "config.toml").write_text(path.read_text())
        (run / "run.json").write_text(json.dumps([
            {"hardware": "a fake", "commit": "abc", "versions": {}, "date": "2026-11-26 12:00 UTC"}]))
    (run / "pid").write_text(str(os.getpid()))
    if FAKE.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (run / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    begun = max((int(p.name) for p in (run / "checkpoints").glob("*")), default=-1)
    assert bool(options) == (begun >= 0), "resumed exactly if there is a checkpoint"
    return steps(cfg, run, begun, stop)


def warm_start(run: Path, resumed: bool, stop: list[int]) -> int:
    saved = run / "sft_checkpoints" / "1" / "digests.json"
    assert resumed == saved.is_file(), "resumed exactly if there is a checkpoint"
    if FAKE.get("warm_waits"):
        saved.parent.mkdir(parents=True)
        saved.touch()
        while not stop:
            time.sleep(0.01)
        return 143
    (run / "sft").mkdir(parents=True)
    time.sleep(FAKE.get("starts_s", 0.0))
    (run / "sft" / "trained_on.npy").touch()
    return 0


def steps(cfg: dict, run: Path, begun: int, stop: list[int]) -> int:
    code = next((c for name, c in FAKE.get("ends", {}).items() if run.name.startswith(name)), 0)
    for step in range(begun + 1, cfg["run"]["steps"] + 1):
        with (run / "metrics.jsonl").open("a") as file:
            print(json.dumps({"step": step, "eval/reward_mean": step / 10, "time/step_s": 1.0}), file=file)
        (run / "checkpoints" / str(step)).mkdir(parents=True)
        (run / "checkpoints" / str(step) / "digests.json").touch()
        while FAKE.get("waits") and step == 1 and not stop:
            time.sleep(0.01)
        if code and step == 2:
            print(f"jaxfp8rl: it failed\n  next step: none\n{'-' * 9}")
            return code
        if stop:
            return 143
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
