"""Shipped presets as they stand, on the card that they are named after: three steps each, on random weights
of their model's shape.

    jaxfp8rl bench presets [NAME ...] [--steps 3] [--section.key VALUE ...]

For each preset a folder is made as `jaxfp8rl random-model` makes it, and `jaxfp8rl train NAME` runs in a
child process. Only what random weights and a small disk ask for differs from the preset: the model's folder,
the number of steps, no checkpoints (8B's take 41 GB), no evaluation, and a reward for ending early
(loss.overlong_buffer): random weights solve nothing, and an update skips groups whose rewards are all equal.
Options with a dot are settings of every run.

The first update: seconds from the command to its end, less the median rollout of the later steps. The peak of
the learner is that of JAX's allocator beside the plan. The device's is the driver's, learner and engine
together, sampled twice a second, beside the plan and the card's memory. Console lines of an allocator are
counted. The console is kept beside the result while the run goes on, each line with the seconds since the
command, and then what other libraries wrote. Cases of earlier runs stay in the file.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, require_gpu, row, write
from benchmarks.processes import kill_group
from jaxfp8rl.cli.random_model import random_model
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.memory.cache import chosen_gib
from jaxfp8rl.memory.fit import needs
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.known import shape_named
from jaxfp8rl.monitors.jsonl import read_metrics

DEFAULT = ("qwen3-0.6b-h100", "qwen3-1.7b-h100", "qwen3-4b-h100", "qwen3-8b-h100")
CHANGED = ("--run.save_every", "0", "--task.options.held_out_size", "0")
# seconds from a cold start to the end of the first update, as the issue of the H100 presets asks for
FIRST_UPDATE = {"Qwen3-1.7B": 75.0, "Qwen3-8B": 150.0}
ALLOCATOR = re.compile(r"bfc_allocator|Garbage collection|ran out of memory trying to allocate")
PHASES = ("rollout", "score", "update", "publish")


class Seen(NamedTuple):
    """What a run left: its exit code, the records of its metrics, when each came (seconds after the command),
    the lines of its console, and the most memory in use on a device, in MiB (None without a driver)."""

    code: int
    records: list[dict[str, Any]]
    times: list[float]
    console: list[str]
    device: int | None


def main() -> None:
    parser = arguments(__doc__, "presets_h100")
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(DEFAULT),
                        help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="default: %(default)s; at least 2")
    parser.add_argument("--models", type=Path, metavar="FOLDER",
                        help="where model folders are kept; default: each is deleted after its last preset")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds of a run: %(default)s")
    args, settings = parser.parse_known_args()
    require_gpu(__file__)
    loaded = {name: load_config(name, [*CHANGED, *ends_early(load_config(name)), *settings])
              for name in args.names}
    configs = dict(sorted(loaded.items(), key=lambda pair: pair[1].model.path))  # each folder is made once
    cases, code = {}, 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, cfg in configs.items():
            made = model_folder(cfg, args.models or Path(scratch))
            options = [*CHANGED, *ends_early(cfg), *settings, "--run.steps", str(args.steps),
                       "--model.path", str(made)]
            log = args.out.with_name(f"{args.out.stem}_{name}.log")
            folder = Path(scratch, name)
            seen = run(train(name, folder, options), folder, args.timeout, in_use, log)
            keep(log, folder)
            cases[name], code = (cfg, seen), max(code, abs(seen.code))
            shutil.rmtree(folder, ignore_errors=True)
            ahead = {c.model.path for n, c in configs.items() if n not in cases}
            if not args.models and cfg.model.path not in ahead:
                shutil.rmtree(made)
    rows = [r for name, (cfg, seen) in cases.items() for r in rows_of(name, cfg, seen, args.steps, card())]
    write(args.out, "presets_h100", [*earlier(args.out, cases), *rows], args.plot)
    sys.exit(code)


def ends_early(cfg: Config) -> list[str]:
    """The option that gives completions of different lengths different rewards."""
    return ["--loss.overlong_buffer", str(cfg.rollout.max_new_tokens)]


def model_folder(cfg: Config, folder: Path) -> Path:
    """The folder of the config's model, made unless it is there."""
    made = folder / Path(cfg.model.path).name
    if not made.exists():
        print(random_model(made.name, made), flush=True)
    return made


def train(name: str, folder: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "jaxfp8rl", "train", name, "--run.dir", str(folder), *options]


def run(command: Sequence[str], folder: Path, timeout: float, used: Callable[[], int | None],
        log: Path, most: float = float("inf")) -> Seen:
    """Run `command`, which writes the run directory `folder` and whose console goes to `log` line by line;
    twice a second, look at its metrics and at `used`. After `timeout` seconds or `most` lines of metrics, or
    if this process is interrupted, its whole process group is killed."""
    began, times, device, metrics = time.monotonic(), [], [], folder / "metrics.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             errors="replace", start_new_session=True)
    printed: list[str] = []
    reader = threading.Thread(target=_read, args=(child, log, printed, began))
    reader.start()
    try:
        while True:
            ended, passed = child.poll() is not None, time.monotonic() - began
            times += [passed] * (lines(metrics) - len(times))
            device.append(used())
            if ended or passed > timeout or len(times) >= most:
                break
            time.sleep(0.5)
    finally:
        kill_group(child)
        reader.join()
    records = read_metrics(metrics) if metrics.exists() else []
    most = max((x for x in device if x is not None), default=None)
    return Seen(child.wait(), records, times, printed, most)


def _read(child: subprocess.Popen[str], log: Path, printed: list[str], began: float) -> None:
    """Add the child's lines to `printed`, and to `log` with their seconds after `began`, until its end."""
    assert child.stdout
    with log.open("w") as file:
        for line in child.stdout:
            printed.append(line.rstrip("\n"))
            file.write(f"{time.monotonic() - began:7.1f}  {line}")
            file.flush()


def lines(path: Path) -> int:
    """The number of whole lines."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def in_use(gpus: str = "") -> int:
    """The memory in use on the fullest of these GPUs, by default of those that this process may use, in
    MiB."""
    return max(map(int, _ask("memory.used", gpus).split()))


def card() -> int:
    """The memory of a GPU, in MiB."""
    return int(_ask("memory.total").split()[0])


def _ask(field: str, gpus: str = "") -> str:
    mine = gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", *([f"--id={mine}"] if mine else []), f"--query-gpu={field}",
             "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout


def keep(log: Path, folder: Path) -> None:
    """Append to `log` what other libraries wrote."""
    with log.open("a") as file:
        for path in sorted((folder / "logs").glob("*.txt")):
            file.write(f"\n{path.name}\n{path.read_text(errors='replace')}")


def earlier(out: Path, cases: Mapping[str, Any]) -> list[dict]:
    """The rows of the file whose presets did not run now."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    return [r for r in rows if r["case"].partition(":")[0] not in cases]


def rows_of(name: str, cfg: Config, seen: Seen, steps: int, total: int) -> list[dict]:
    """The rows of a preset on a card of `total` MiB. A run that ended early has those that it came to."""
    model = shape_named(Path(cfg.model.path).name)
    r = cfg.rollout
    case = (f"{name}: {Path(cfg.model.path).name}, {r.prompts_per_step * r.samples_per_prompt} x "
            f"{r.max_new_tokens:,} tokens")
    done = max([int(record["step"]) for record in seen.records], default=0)
    applied = sum(record.get("update/applied", 0.0) for record in seen.records)
    noise = sum(bool(ALLOCATOR.search(line)) for line in seen.console)
    rows = [row(case, "steps", "", done, steps, "the steps asked for"),
            row(case, "updates applied", "", applied, steps, "the steps asked for"),
            row(case, "exit code", "", seen.code, 0, "0", True),
            row(case, "lines of an allocator", "", noise, 0, "none", True)]
    rows += _memory(case, cfg, model, seen, total)
    later = [record for record in seen.records if record["step"] > 1]
    return rows + (_times(case, Path(cfg.model.path).name, seen, later) if later else [])


def _memory(case: str, cfg: Config, model: ModelConfig, seen: Seen, total: int) -> list[dict]:
    plan = sum(size for _, size in memory_plan(cfg, model)) / 2**30
    if cfg.rollout.kv_cache_gib == "auto":
        cfg = cfg.having("rollout", kv_cache_gib=chosen_gib(cfg, model, total * 2**20))
    rows = []
    if any("memory/peak_gib" in record for record in seen.records):
        peak = max(record.get("memory/peak_gib", 0.0) for record in seen.records)
        rows.append(row(case, "peak of the learner", "GiB", peak, plan, "the plan", True))
    if seen.device is not None:
        device, stages = seen.device / 2**10, needs(cfg, model, total * 2**20).values()
        rows += [row(case, "peak of the device", "GiB", device, max(stages) / 2**30, "the plan", True),
                 row(case, "peak of the device, of the card", "GiB", device, total / 2**10, "the card", True)]
    return rows


def _times(case: str, model: str, seen: Seen, later: list[dict]) -> list[dict]:
    """Medians over the steps after the first, which compiles."""
    median = lambda key: statistics.median(record[key] for record in later)
    at, first = next((t, record) for t, record in zip(seen.times, seen.records) if record["step"] == 1)
    update = at - first["time/publish_s"] - median("time/rollout_s")
    step = median("time/step_s")
    tokens = statistics.median(record["tokens/rollout"] / record["time/step_s"] for record in later)
    bar, whose = FIRST_UPDATE.get(model, step), "the bar" if model in FIRST_UPDATE else "a step"
    return [row(case, "first update", "s", update, bar, whose, True),
            row(case, "first step", "s", first["time/step_s"], step, "a later step", True),
            row(case, "step", "s", step, median("time/rollout_s"), "its rollout", True),
            row(case, "step", "tokens/s", tokens, median("tokens/rollout_per_s"), "its rollout"),
            *(row(case, phase, "s", median(f"time/{phase}_s"), step, "the step", True) for phase in PHASES)]


if __name__ == "__main__":
    main()
