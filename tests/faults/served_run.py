"""A run of micro_run's size that samples on served engines in processes of their own, and is killed, or has
one of them killed, in the middle of a call; as a program, one process of such a run:

    python served_run.py KIND FOLDER STEPS KILLS    goes on with the run in FOLDER, until it ends or is killed

KIND "whole groups" and "in flight": the engines are stand_in_program's, and publishes wait for groups or
interrupt them; "vllm": publishes interrupt two stock `vllm serve`. The run's own code builds, feeds and
restarts all of them alike. KILLS: a JSON list of Kill, of which the next that has not happened yet is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "bridges")]

import async_run
import micro_run
import stand_in_program
from micro_run import outlives, words
from stand_in_program import ByFolder

ENGINES = 2
SETTINGS = {
    "rollout__engine": "served", "rollout__engines": ENGINES, "rollout__link": "file",
    "rollout__restarts": 99,
    "rollout__request_timeout_s": 60.0, "gate__completions": 1, "gate__max_mean_gap": 1e6,
    "gate__max_gap": 1e6,
    "run__save_every": 1, "run__keep_checkpoints": 9,
    "precision__weight_dtype": "float32", "precision__compute_dtype": "float32", "optim__master": "float32",
}
IN_FLIGHT = SETTINGS | {
    "rollout__max_staleness": 1, "rollout__in_flight": "true", "rollout__oversample": 1.25,
    "rollout__samples_per_prompt": 3, "rollout__max_new_tokens": 16, "run__save_every": 2,
    "run__keep_checkpoints": 99,
}
VLLM = {name.replace(".", "__"): value for name, value in async_run.SERVED.items()} | {
    "rollout__restarts": 9, "run__save_every": 2, "run__keep_checkpoints": 99}
KINDS = {"whole groups": SETTINGS, "in flight": IN_FLIGHT, "vllm": VLLM}
SECONDS = 0.15  # that a completion takes, and that weights are on their way
TOKEN_SECONDS = 0.02  # of a stream


@dataclasses.dataclass(frozen=True)
class Kill:
    """SIGKILL of "learner" or "replica" (the one of number `step` modulo ENGINES), `after` seconds into a
    "publish" or a "generation" of step `step` or a later one."""

    whom: str
    when: str
    step: int
    after: float


def drawn(count: int, steps: int, seed: int, whens: tuple[str, ...] = ("publish", "generation"),
          seconds: float = SECONDS) -> list[Kill]:
    """Random kills, of each kind as many, by their steps, up to `seconds` into their call."""
    rng = random.Random(seed)
    kinds = [(whom, when) for whom in ("replica", "learner") for when in whens]
    found = [Kill(*kinds[i % len(kinds)], rng.randint(1, steps), round(rng.uniform(0, seconds), 3))
             for i in range(count)]
    return sorted(found, key=lambda kill: kill.step)


def until_done(folder: Path, steps: int, kills: list[Kill], kind: str = "whole groups") -> list[dict]:
    """Start processes of the run until one ends by itself -> a line for each: its exit, its seconds, the
    kills that happened meanwhile, the last step in its record, and its engines that are still there. The
    record as each left it stays as metrics-N.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "temporary").mkdir(exist_ok=True)
    lines, noted = [], 0
    command = [sys.executable, __file__, kind, str(folder), str(steps),
               json.dumps([dataclasses.astuple(k) for k in kills])]
    while not lines or lines[-1]["exit"]:
        begun = time.monotonic()
        done = subprocess.run(command, env=os.environ | {"TMPDIR": str(folder / "temporary")},
                              stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=900)
        if done.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(f"a process of the run ended with {done.returncode}:\n{done.stdout[-3000:]}")
        happened = (folder / "kills").read_text().splitlines() if (folder / "kills").exists() else []
        pids = [int(p) for p in (folder / "pids").read_text().split()]
        shutil.copyfile(folder / "run" / "metrics.jsonl", folder / f"metrics-{len(lines)}.jsonl")
        rows = micro_run.metrics(folder / "run")
        lines.append({"exit": done.returncode, "seconds": round(time.monotonic() - begun, 1),
                      "kills": happened[noted:], "step": rows[-1]["step"] if rows else None,
                      "engines left": sum(map(outlives, set(pids)))})
        noted = len(happened)
        (folder / "pids").write_text("")
    return lines


class Killer:
    """Does the kills, each once over all processes of a run. It notes each before. One replica is always up:
    a second one is killed once the first has returned. None would have weights otherwise, and
    `engine/healthy` would be 0, as nobody can tell beforehand."""

    def __init__(self, folder: Path, kills: list[Kill]):
        self._folder = folder
        noted = (folder / "kills").read_text().splitlines() if (folder / "kills").exists() else []
        self._open, self.processes, self.engines = [k for k in kills if str(k) not in noted], None, None
        self._one = threading.Lock()  # held until a replica that is killed has ended

    def called(self, when: str, step: int) -> None:
        for kill in [k for k in self._open if k.when == when and k.step <= step][:1]:
            self._open.remove(kill)
            timer = threading.Timer(kill.after, self._kill, [kill])
            timer.daemon = True
            timer.start()

    def _kill(self, kill: Kill) -> None:
        with self._one if kill.whom == "replica" else contextlib.nullcontext():
            while kill.whom == "replica" and not self._all_up():
                time.sleep(0.01)
            with (self._folder / "kills").open("a") as file:
                print(kill, file=file, flush=True)
            if kill.whom == "learner":
                os.kill(os.getpid(), signal.SIGKILL)
            os.killpg(self.processes.pid(victim := kill.step % ENGINES), signal.SIGKILL)
            while self.processes.alive(victim):
                time.sleep(0.01)

    def _all_up(self) -> bool:
        """Also one that nobody asks, so that the client does not know of its death."""
        return all(map(self.processes.alive, range(ENGINES))) and not any(
            r.down for r in self.engines.client.replicas)


def stand_ins(folder: Path) -> None:
    """Stand-ins in the place of vLLM, and weights as folders."""
    from bridges.served import serve_process, served_transport
    from jaxfp8rl.publish.wire import wire_manifest
    from jaxfp8rl.rollout import engines, served

    metas = []

    def parts(cfg, model, runs):
        metas[:] = wire_manifest(model, runs, "float32")
        (folder / "manifest.json").write_text(json.dumps([dataclasses.asdict(m) for m in metas]))
        return str(folder / "manifest.json"), ["--vocab", str(model.vocab_size), "--seconds", str(SECONDS),
                                               "--token-seconds", str(TOKEN_SECONDS)], {}

    def transport(token, link, urls, cache, **senders):
        return ByFolder(token, urls, metas, lambda urls: time.sleep(SECONDS))

    serve_process.console_script = lambda: stand_in_program.script(folder)
    served._serve_parts, engines.engine_lacks = parts, lambda cfg: None
    served_transport.ServedTransport = transport


def tell(folder: Path, killer: Killer) -> None:
    """The killer is told of calls, and of the children, which are noted for who looks for them later."""
    from bridges.served import serve_process, served_engines

    start = serve_process.ServeProcesses.start
    publish, generate = served_engines.ServedEngines.publish, served_engines.ServedEngines.generate
    at = [0]  # the version of the last publish: what is sampled then is of the step after it

    def started(self, i):
        start(self, i)
        killer.processes = self
        with (folder / "pids").open("a") as file:
            print(self.pid(i), file=file, flush=True)

    def published(self, source, version):
        killer.engines = self
        killer.called("publish", version)
        at[0] = version
        return publish(self, source, version)

    def generated(self, requests):
        if requests[0].n > 1:  # no evaluation
            killer.called("generation", at[0] + 1)
        return generate(self, requests)

    serve_process.ServeProcesses.start = started
    served_engines.ServedEngines.publish, served_engines.ServedEngines.generate = published, generated


def main(kind: str, folder: Path, steps: int, kills: list[Kill]) -> int:
    from jaxfp8rl.cli.main import main as command_line
    from jaxfp8rl.rewards.runner import RewardRunner

    RewardRunner.score = micro_run.rewarded
    if kind != "vllm":
        stand_ins(folder)
    tell(folder, Killer(folder, kills))
    record = folder / "run" / "metrics.jsonl"
    used = record.exists() and record.stat().st_size
    settings = words(folder / "run", run__steps=steps, **KINDS[kind])
    return command_line(["train", "demo", *settings] + ["--resume"] * bool(used))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]),
                  [Kill(*k) for k in json.loads(sys.argv[4])]))
