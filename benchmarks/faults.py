"""A hundred faults in one run (kills, engine deaths, full disks, damaged checkpoints, NaNs, bad rows) and the
losses that they caused.

    jaxfp8rl bench faults [--steps 60] [--seed 0]    # minutes, CPU

Faults of data (a batch with a NaN, missing log-probabilities, undefined scores, broken rows) cost as much as
docs/faults.md says: an update, a group, a score, a row. They are scheduled by step, so that an undisturbed
run has the same ones. Faults of processes and disks (SIGKILL and SIGTERM anywhere in a step, an engine that
dies, a save that fails, a flipped bit in the newest checkpoint, truncated lines) are added in the disturbed
run, which is resumed until it finishes. They must cost nothing: both runs are compared line by line and bit
by bit, and no child may outlive a process that was killed.

Needs no GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

from micro_run import arrays, child, equal, lasting, metrics, outlives, words
from served_jax import served

from benchmarks.common import arguments, row, write
from bridges.served.served_engines import ServedEngines
from jaxfp8rl.checkpoint import store
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.cli.main import main as command_line
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.rollout import engines, scored_groups
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training import context, loop, publishing, updates

SAVE_EVERY, BAD_ROWS, ROWS = 3, 10, 200
PLACES = {  # name: the function before which the process dies
    "generate": (scored_groups, "generate"), "reward": (scored_groups, "score"), "score": (loop, "score"),
    "learn": (loop, "run_updates"),
    "update": (updates, "find_nonfinite"), "publish": (publishing, "publish"),
    "log": (RunDirectory, "log"),
    "save": (Checkpoints, "save_async"), "digest": (store, "seal"), "sync": (store, "_sync"),
    "rename": (Path, "rename"),
}
IN_SAVE = ("save", "digest", "sync", "rename")


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    step: int
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.step} {self.place}"


def plan(steps: int, seed: int) -> list[Fault]:
    """Every fault by its step. At most two data faults come in a row, because three would rightly stop the
    run."""
    rng, saved = random.Random(seed), range(SAVE_EVERY, steps + 1, SAVE_EVERY)
    lone = rng.sample(range(2, steps + 1, 2), 24)
    faults = [Fault("NaN in a batch", s)
              for s in lone[:12]] + [Fault("log-probabilities are none", s) for s in lone[12:]]
    places = [p for p in PLACES if p != "update"]
    for i in range(20):
        place = places[i % len(places)]
        faults.append(Fault("SIGKILL", rng.choice(saved if place in IN_SAVE else range(1, steps + 1)), place))
    faults += [Fault("SIGTERM", s, "learn") for s in rng.sample(range(1, steps), 4)]
    faults += [Fault("engine dies", s) for s in rng.sample(range(1, steps + 1), 16)]
    faults += [Fault("save fails", s) for s in rng.sample(saved[:-1], 10)]
    return list(dict.fromkeys(faults))


class Injector:
    """Inside a run's process: triggers each planned fault once, over all processes, and records it first."""

    def __init__(self, faults: list[Fault], done: Path, kinds: tuple[str, ...]):
        self._done, self.step = done, 0
        noted = done.read_text().splitlines() if done.exists() else []
        self._open = [f for f in faults if f.kind in kinds and str(f) not in noted]

    def due(self, kind: str, place: str = "", again: bool = False) -> bool:
        """Whether the fault is to happen now. `again`: also in a repeated step, because it belongs to the
        data. A save is written while later steps run."""
        late = kind == "save fails" or place in IN_SAVE
        found = next((f for f in self._open if (f.kind, f.place) == (kind, place)
                      and (f.step == self.step or late and f.step < self.step)), None)
        if found and not again:
            self._open.remove(found)
            with self._done.open("a") as file:
                print(found, file=file, flush=True)
        return bool(found)


def inject(injector: Injector) -> None:
    """Install the faults in this process, at the places where they would occur."""
    one_step, to_samples, generate, seal, make = (
        loop.one_step, scored_groups.to_samples, ServedEngines.generate, store.seal, engines._jax
    )

    def stepping(parts, run, state, policy, step):
        injector.step = step
        return one_step(parts, run, state, policy, step)

    def with_nan(*args):
        bad = injector.due("NaN in a batch", again=True)
        return [[s._replace(advantage=float("nan") if bad else s.advantage) for s in group]
                for group in to_samples(*args)]

    def mistaken(engine, requests):
        groups = generate(engine, requests)
        if requests[0].n > 1 and injector.due("log-probabilities are none", again=True):
            whole = groups[1][0]
            spoilt = (None, whole.logprobs[:-1], np.full_like(whole.logprobs, np.nan))[injector.step % 3]
            groups[1][0] = dataclasses.replace(whole, logprobs=spoilt)
        return groups

    def failing(folder):
        if injector.due("save fails"):
            raise OSError(errno.ENOSPC, "No space left on device")
        seal(folder)

    def build(*args):
        return served(lambda: make(*args[:3]), lambda: injector.due("engine dies"), restarts=100)

    loop.one_step, scored_groups.to_samples, ServedEngines.generate = stepping, with_nan, mistaken
    store.seal, context.build_engine, RewardRunner.score = failing, build, rewarded
    for place, (owner, name) in PLACES.items():
        setattr(owner, name, mortal(injector, place, getattr(owner, name)))


def mortal(injector: Injector, place: str, function):
    def called(*args, **kwargs):
        for kind in ("SIGKILL", "SIGTERM"):
            if injector.due(kind, place):
                os.kill(os.getpid(), getattr(signal, kind))
        return function(*args, **kwargs)

    return called


def rewarded(self: RewardRunner, items) -> list[Score]:
    """A score derived from the text; one in forty is undefined."""
    drawn = [zlib.crc32(f"{problem.id} {text}".encode()) for problem, text in items]
    return [Score(None, "timeout") if n % 40 == 0 else Score(n % 7 / 6, "ok") for n in drawn]


def run(folder: Path, steps: int, seed: int, kinds: tuple[str, ...]) -> int:
    """`python benchmarks/faults.py run ...`: one process of a run, new or resumed, with a child that must end
    with it."""
    print("child", child(), flush=True)
    inject(Injector(plan(steps, seed), folder / "done", kinds))
    used = (folder / "run" / "metrics.jsonl").exists() and (folder / "run" / "metrics.jsonl").stat().st_size
    settings = words(
        folder / "run", run__steps=steps, run__save_every=SAVE_EVERY, run__keep_checkpoints=3,
        task__kind="file",
        task__path=folder / "rows.jsonl", task__options="{}", task__skip_bad_rows="true",
    )
    return command_line(["train", "demo", *settings] + ["--resume"] * bool(used))


def write_rows(path: Path) -> None:
    broken = ["{", "[]", '{"prompt": ""}', '{"answer": "1"}', '{"prompt": "1+", "answer": 2}'] * 2
    good = [json.dumps({"prompt": f"{i % 10}+{i // 10 % 10}=", "answer": str(i)}) for i in range(ROWS)]
    path.write_text("\n".join(broken[:BAD_ROWS] + good) + "\n")


def until_done(folder: Path, steps: int, seed: int, kinds: tuple[str, ...]) -> dict:
    """Start processes until one finishes by itself; damage the files on disk in between. Returns counts of
    the events."""
    folder.mkdir(parents=True)
    write_rows(folder / "rows.jsonl")
    rng, counts, exits = random.Random(seed), collections.Counter(), collections.Counter()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
    }
    begun = time.monotonic()
    while True:
        command = [sys.executable, __file__, "run", str(folder), str(steps), str(seed), ",".join(kinds)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        exits[done.returncode] += 1
        orphan = int(done.stdout.split("child ")[1].split()[0])
        if done.returncode == 0 and metrics(folder / "run")[-1]["step"] == steps:
            break
        told_to_go_without_room = done.returncode == 2 and "make room in run.dir" in done.stdout
        if done.returncode not in (-signal.SIGKILL, 128 + signal.SIGTERM) and not told_to_go_without_room:
            raise SystemExit(f"a process of the run ended with {done.returncode}:\n{done.stdout[-3000:]}")
        counts["children left"] += outlives(orphan)
        hurt_disk(folder / "run", rng, counts)
    noted = (folder / "done").read_text().splitlines() if (folder / "done").exists() else []
    counts.update(" ".join(line.split()[:-2] if line.split()[-1] in PLACES else line.split()[:-1])
                  for line in noted)
    return {"counts": counts, "exits": {str(k): v for k, v in exits.items()},
            "seconds": time.monotonic() - begun, "noted": noted}


def hurt_disk(directory: Path, rng: random.Random, counts: collections.Counter) -> None:
    """Occasionally flip a bit in the newest of several checkpoints, or truncate the last line of a log."""
    steps = Checkpoints(directory / "checkpoints", 3).steps()
    if len(steps) > 1 and rng.random() < 0.4:
        files = [p for p in sorted((directory / "checkpoints" / str(steps[-1])).rglob("*")) if p.is_file()
                 and p.stat().st_size]
        victim = rng.choice(files)
        contents, at = bytearray(victim.read_bytes()), rng.randrange(victim.stat().st_size)
        contents[at] ^= 1 << rng.randrange(8)
        victim.write_bytes(contents)
        counts["bit flips in a checkpoint"] += 1
    if (directory / "metrics.jsonl").exists() and rng.random() < 0.6:
        with (directory / rng.choice(["metrics.jsonl", "samples.jsonl"])).open("a") as file:
            file.write('{"step": 7, "loss": 0.')
        counts["line cut short"] += 1


DATA = ("NaN in a batch", "log-probabilities are none")
PROCESS = ("SIGKILL", "SIGTERM", "engine dies", "save fails")


def main() -> None:
    parser = arguments(__doc__, "faults")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"),
                        help="where the two runs lie; made afresh")
    args = parser.parse_args()
    undisturbed = until_done(args.folder / "undisturbed", args.steps, args.seed, DATA)
    disturbed = until_done(args.folder / "disturbed", args.steps, args.seed, DATA + PROCESS)
    runs = [args.folder / name / "run" for name in ("disturbed", "undisturbed")]
    (have, lines), (want, straight) = ((arrays(r, args.steps), lasting(metrics(r))) for r in runs)
    samples, expected = ((r / "samples.jsonl").read_text().splitlines() for r in runs)
    counts = collections.Counter({k: v for k, v in disturbed["counts"].items() if k != "children left"})
    counts |= {
        "NaN in a batch": sum(not r["update/applied"] for r in straight[1:]), "bad row": BAD_ROWS,
        "log-probabilities are none": sum(int(r["rollout/groups_rejected"]) for r in straight[1:]),
        "undefined score": sum(int(r["reward/undefined"]) for r in straight[1:]),
    }
    planned = collections.Counter(f.kind for f in plan(args.steps, args.seed))
    rows = [row(f"fault: {kind}", "happened", "faults", n, planned[kind] or n, "planned")
            for kind, n in sorted(counts.items())]
    rows += [
        row("all faults", "happened", "faults", counts.total(), 100, "promised"),
        row("final state", "arrays equal bit for bit", "arrays",
            sum(np.array_equal(have[n], want[n]) for n in want), len(want),
            "undisturbed run"),
        row("metrics.jsonl", "lines equal", "lines", sum(map(equal, lines, straight)), len(straight),
            "undisturbed run"),
        row("samples.jsonl", "lines equal", "lines", sum(a == b for a, b in zip(samples, expected)),
            len(expected),
            "undisturbed run"),
        row("children", "left behind", "processes", disturbed["counts"]["children left"], 0, "none",
            smaller_is_better=True),
    ]
    write(args.out, "faults", rows, args.plot, steps=args.steps, seed=args.seed, undisturbed=undisturbed,
          disturbed=disturbed)
    if len(have) != len(want) or len(lines) != len(straight) or any(
            r["ours"] != r["yardstick"] for r in rows[-4:]):
        raise SystemExit("the disturbed run is not the undisturbed one")


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        sys.exit(run(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), tuple(sys.argv[5].split(","))))
    main()
