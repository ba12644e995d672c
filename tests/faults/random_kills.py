"""An asynchronous run on two served engines that is killed at random moments, and what that has cost:
nothing.

When a token is sampled, and by which version, is a matter of timing, so no second run samples the same. The
run records what it learned from, though. A run that begins anew and is given all of the records must come to
the same masters, metrics and samples, although nothing is killed in it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import micro_run
import numpy as np
from served_run import Kill, drawn, until_done

from jaxfp8rl.monitors.jsonl import read_metrics

STEP_SECONDS = {"in flight": 1.0, "vllm": 8.0}  # within which a kill comes: about what a step takes


def planned(kind: str, count: int, steps: int, seed: int) -> list[Kill]:
    """As many of replicas as of the learner, any time after a publish."""
    return drawn(count, steps - 2, seed, ("publish",), STEP_SECONDS[kind])


def cost(folder: Path, kind: str, steps: int, kills: list[Kill]) -> dict:
    """Run, kill, resume, until all is done; then replay -> what `compared` finds."""
    lines = until_done(folder / "killed", steps, kills, kind)
    from_the_start(folder / "killed" / "run", folder / "replayed" / "run")
    until_done(folder / "replayed", steps, [], kind)
    return compared(folder, lines, steps)


def compared(folder: Path, lines: list[dict], steps: int) -> dict:
    """The two runs in `folder`, and the lines of `until_done` about the first."""
    run, again = folder / "killed" / "run", folder / "replayed" / "run"
    have, want = micro_run.arrays(run, steps), micro_run.arrays(again, steps)
    lasting = lambda path: micro_run.lasting(read_metrics(path))
    rows, replayed = (lasting(each / "metrics.jsonl") for each in (run, again))
    told = [lasting(folder / "killed" / f"metrics-{n}.jsonl") for n in range(len(lines))]
    return {
        "log": lines, "kills": [kill for line in lines for kill in line["kills"]],
        "processes killed": sum(line["exit"] < 0 for line in lines),
        "engines left": sum(line["engines left"] for line in lines),
        "arrays": [np.array_equal(have[name], want[name]) for name in sorted(have.keys() | want.keys())],
        "metrics": [micro_run.equal(a, b) for a, b in zip(rows, replayed, strict=True)],
        "told before": [micro_run.equal(rows[row["step"]], row) for each in told for row in each],
        "samples": [a == b for a, b in zip(*(lines_of(each / "samples.jsonl") for each in (run, again)),
                                           strict=True)],
        "groups": groups(run, steps),
    }


def from_the_start(run: Path, again: Path) -> None:
    """A copy of a run that has its records, and no checkpoint but the first."""
    shutil.copytree(run, again)
    for checkpoint in (again / "checkpoints").iterdir():
        if checkpoint.name != "0":
            shutil.rmtree(checkpoint)


def groups(run: Path, steps: int) -> dict[str, int]:
    """How many groups were admitted, and what became of them. "lost": of those that nobody knows any more,
    and of those learned from twice; "short": completions that were learned from though they were not done."""
    lines = [json.loads(line) for line in lines_of(run / "rollouts.jsonl")]
    admitted, taken, dropped = ([name for line in lines for name in line[what]]
                                for what in ("admitted", "taken", "dropped"))
    records = [json.loads((run / "rollouts" / f"{step}.json").read_text()) for step in range(1, steps + 1)]
    left = [ticket["name"] for ticket in records[-1].get("queue", ())]
    done = [c for record in records for round in record["taken"] for t in round for c in t["completions"]]
    return {"admitted": len(admitted), "taken": len(taken), "dropped": len(dropped), "left": len(left),
            "lost": len(admitted) - len(taken) - len(dropped) - len(left) + len(taken) - len(set(taken)),
            "short": sum(c["finish_reason"] not in ("stop", "length") for c in done),
            "in flight across a publish": sum(len(c["version_spans"]) > 1 for c in done)}


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()

