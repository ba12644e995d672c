"""TRL as a control of an experiment: GRPOTrainer in BF16 learns what the experiment's control learns.

    jaxfp8rl bench trl_learns [--experiment smollm2_sums] [--seeds 0 1 2 3 4] [--jobs 1] [--minutes 9.5]
        [--microbatch 64] [--liger] [--no-vllm] [--section.key VALUE ...]

Each seed is a run of TRL's GRPOTrainer, unmodified, with vLLM colocated, in a child process. It has the
config of the control's cell at that seed: the model's folder, the prompts in their order, the scorer, the
batch, the steps, the rates of all updates, AdamW's constants, the clip, the temperature, the length of a
completion, no KL term, the mean over a batch's tokens as the loss. A child refuses to start if TRL's prompts
differ from ours in a token, and so does this command if the control has a setting that TRL would not be
given. What still differs is in DIFFERS, in the lines and on the experiment's page. TRL saves its weights
where the control evaluates. Afterwards our engine publishes and evaluates each folder as a cell does, so that
both have one judge.

The clock is that of cells: the time of the steps themselves, here from on_step_begin to on_step_end, with the
device synchronised. It leaves out the start, which is given apart, logging and saving. --jobs runs so many
seeds at once on each GPU, of which one at a time builds its trainer, since vLLM measures the memory that is
free. Seeds share the GPU, which slows their clocks as it does those of cells.

A seed leaves experiments/results/NAME/beside/trl-sSEED.jsonl, from which `jaxfp8rl experiment report NAME`
draws it beside the arms. Seeds with lines do not run again. With --minutes, the command ends what runs in
time to judge what is done, and the same command goes on. Options with a dot change the config, for a trial:
lines of other settings than the control's are refused by the report.

`python benchmarks/trl_learns.py --no-vllm` with a small batch shows on a CPU that it works.

Needs a GPU and vLLM; trl, and Liger's kernels for --liger.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.processes import kill_group
from benchmarks.trl_settings import grpo_settings, title
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.experiments import analysis
from jaxfp8rl.experiments.beside import FOLDER, read_guests
from jaxfp8rl.experiments.cells import cells, digest_of, name_of
from jaxfp8rl.experiments.protocol import Experiment, load_protocol
from jaxfp8rl.experiments.results import DONE, read_result, read_results, write_lines
from jaxfp8rl.experiments.runner import TIED
from jaxfp8rl.gpus import gpus
from jaxfp8rl.run.provenance import commit, versions

CHILDREN = str(Path(__file__).with_name("trl_children.py"))
JUDGE_S = 120.0  # of --minutes, kept for the evaluation
# Settings that TRL is given, and those that change nothing that is learned. None: the whole section.
TAKEN = {
    "run": {"dir", "steps", "seed", "eval_every", "eval_problems", "save_every", "keep_checkpoints"},
    "model": {"path"}, "task": None,
    "rollout": {"engine", "prompts_per_step", "samples_per_prompt", "max_new_tokens", "temperature",
                "gpu_memory_utilization", "kv_cache_gib"},
    "train": {"row_tokens", "rows_per_microbatch", "remat"},
    "optim": {"lr", "warmup_steps", "b1", "b2", "eps", "weight_decay", "clip_norm"},
    "correction": {"preset", "allow_uncorrected_fp8"},
}
DIFFERS = (
    "An advantage is divided by the group's sample standard deviation and 1e-4, the control's by the "
    "population's.",
    "The learner computes under PyTorch's autocast to BF16, over float32 weights as the control's.",
    "A micro-batch is {microbatch} completions, padded to the longest of the step; the control packs them.",
    "Random numbers are PyTorch's. vLLM's begin alike at every seed, since TRL gives it no other; a seed "
    "decides the order of the prompts.",
    "vLLM's cache is what TRL leaves it of {memory:g} of the GPU's memory; the control's is of a fixed size.",
)
SAMPLES_WITHOUT_VLLM = "It sampled with transformers, not with vLLM."


class Guest(NamedTuple):
    """A seed. cfg: that of the control's cell. work: the folder of these very settings. lines: the file that
    it leaves."""

    seed: int
    cfg: Config
    work: Path
    lines: Path

    @property
    def config(self) -> Path:
        return self.work / "config.toml"

    def begin(self) -> None:
        """An empty folder with the config."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.config.write_text(dump_config(self.cfg), encoding="utf-8")

    @property
    def trained(self) -> Path:
        """What the parent writes when the child is done."""
        return self.work / "trained.json"

    def folders(self) -> dict[int, str]:
        """The folder of the weights at each step that is evaluated."""
        run = self.cfg.run
        steps = sorted({*range(run.eval_every, run.steps + 1, run.eval_every), run.steps})
        return {0: self.cfg.model.path} | {s: str(self.work / "trl" / f"checkpoint-{s}") for s in steps}


def main() -> None:
    parser = arguments(__doc__, "trl_learns")
    parser.add_argument("--experiment", default="smollm2_sums", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="default: the experiment's")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at once on a GPU; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many minutes")
    parser.add_argument("--microbatch", type=int, default=64, help="completions; default: %(default)s")
    parser.add_argument("--liger", action="store_true", help="TRL with Liger's kernels")
    parser.add_argument("--no-vllm", action="store_true", help="sample with transformers; on a CPU alone")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: the experiment's own")
    parser.add_argument("--work", type=Path, default=Path("runs/trl_learns"), metavar="FOLDER",
                        help="of the weights and logs; default: %(default)s")
    args, settings = parser.parse_known_args()
    if args.no_vllm and gpus():
        sys.exit("--no-vllm on a GPU would time transformers' sampling as TRL's: leave it out")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, experiment = time.monotonic(), load_protocol(args.experiment)
    results = args.results or experiment.results
    guests = guests_of(experiment, args, results, settings)
    missing = [g for g in guests if not g.lines.is_file()]
    deadline = began + 60 * args.minutes - JUDGE_S
    with children() as start:
        train([g for g in missing if not g.trained.is_file()], args, deadline, start)
        write_all(experiment, [g for g in missing if g.trained.is_file()], args, start)
    done = sum(g.lines.is_file() for g in guests)
    print(f"{done} of {len(guests)} seeds have lines" + ": the same command goes on" * (done < len(guests)))
    compare(args, experiment, results)
    sys.exit(done < len(guests))


def guests_of(experiment: Experiment, args: argparse.Namespace, results: Path,
              settings: list[str]) -> list[Guest]:
    """The guest of each seed, with the config of the control's cell and `settings`. Exits if there is no such
    cell, or if it has a setting that TRL would not be given."""
    control = analysis.control_name(experiment)
    found = {c.seed: c for c in cells(experiment) if name_of(c.arm) == control}
    if unknown := [s for s in args.seeds or () if s not in found]:
        sys.exit(f"{experiment.name}: no cell of a control has the seed {unknown[0]}; seeds: {[*found]}")
    guests = []
    for seed in args.seeds or found:
        if found[seed].warm:
            sys.exit(f"{experiment.name}: its cells begin with a warm start, which TRL would not have")
        cfg = changed(found[seed].cfg, settings)
        if odd := not_taken(cfg):
            sys.exit(f"{experiment.name}: {odd[0]} of the control has no counterpart here: TRL would learn "
                     "something else")
        told = json.dumps([digest_of(cfg), trainer_settings(cfg, Path(), args)])
        work = args.work / experiment.name / f"s{seed}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
        guests.append(Guest(seed, cfg, work, results / FOLDER / f"trl-s{seed}.jsonl"))
        if guests[-1].lines.is_file() and read_result(guests[-1].lines).header["config"] != digest_of(cfg):
            sys.exit(f"{guests[-1].lines}: it ran beside other settings: remove the file, or name other "
                     "--results")
    return guests


def changed(cfg: Config, settings: list[str]) -> Config:
    """The config with `settings` of the command line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.toml")
        path.write_text(dump_config(cfg), encoding="utf-8")
        return load_config(str(path), settings)


def not_taken(cfg: Config) -> list[str]:
    """Settings that are not their defaults, and that TRL is not given."""
    given = cfg.model_dump(exclude_defaults=True)
    odd = [f"{section}.{key}" for section, keys in given.items() for key in keys
           if (known := TAKEN.get(section, set())) is not None and key not in known]
    return odd + ["correction.preset"] * (cfg.correction.preset != "none")


def trainer_settings(cfg: Config, work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of GRPOConfig that say what `cfg` says.

    Our warm-up ends at its last update, and its first update learns: rates (k + 1) / n. TRL's schedule
    warmup_stable_decay has them with n - 1 steps from a share of 1 / n.
    """
    o, r, n = cfg.optim, cfg.rollout, cfg.optim.warmup_steps
    warm = {"num_decay_steps": 0, "min_lr_ratio": 1 / max(n, 1)}
    schedule = {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": n - 1,
                "lr_scheduler_kwargs": warm} if n > 1 else {"lr_scheduler_type": "constant"}
    return grpo_settings(
        work / "trl", steps=cfg.run.steps, prompts=r.prompts_per_step, samples=r.samples_per_prompt,
        tokens=r.max_new_tokens, prompt_tokens=cfg.task.max_prompt_tokens, microbatch=args.microbatch,
        liger=args.liger, learning_rate=o.lr, **schedule, adam_beta1=o.b1, adam_beta2=o.b2,
        adam_epsilon=o.eps, weight_decay=o.weight_decay, max_grad_norm=o.clip_norm, seed=cfg.run.seed,
        temperature=r.temperature,
        loss_type="dapo", scale_rewards="group", epsilon=0.2, epsilon_high=0.2, num_iterations=1,
        vllm_importance_sampling_correction=False, vllm_gpu_memory_utilization=r.gpu_memory_utilization,
        vllm_enable_sleep_mode=False, gradient_checkpointing=cfg.train.remat != "none", shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"}, save_strategy="steps", save_steps=cfg.run.eval_every,
        save_only_model=True, use_vllm=not args.no_vllm, use_cpu=not gpus(), disable_tqdm=True,
    )


# --- the parent: children, one for each seed and one that judges


@contextlib.contextmanager
def children() -> Iterator[Any]:
    """Starts children whose process groups are killed at the end, however it comes."""
    running: list[subprocess.Popen] = []

    def start(what: str, told: dict[str, Any], work: Path, gpu: str = "") -> subprocess.Popen:
        file = work / f"{what}.json"
        file.write_text(json.dumps(told), encoding="utf-8")
        env = {"HF_HUB_OFFLINE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        env |= ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}) | (
            {"JAX_PLATFORMS": "cpu"} if what == "learn" else {})  # the GPU is TRL's
        with (work / f"{what}.log").open("w") as log:
            running.append(subprocess.Popen(
                [*TIED, str(os.getpid()), sys.executable, CHILDREN, what, str(file)], stdout=log,
                stderr=subprocess.STDOUT, env=env, start_new_session=True))
        return running[-1]

    try:
        yield start
    finally:
        for child in running:
            kill_group(child)


def train(guests: Sequence[Guest], args: argparse.Namespace, deadline: float, start: Any) -> None:
    """Run TRL for each guest, `--jobs` at once on each GPU. What runs at the deadline, by time.monotonic, is
    ended."""
    places = [gpu.name for gpu in gpus()] or [""]
    free, now = [*places * args.jobs], {gpu: {} for gpu in places}  # GPU -> seed -> most at once
    ended = threading.Event()
    over = lambda: ended.is_set() or time.monotonic() > deadline

    def one(guest: Guest) -> None:
        if over():
            return
        gpu = free.pop(0)
        guest.begin()
        began = time.monotonic()
        child = start("learn", {
            "config": str(guest.config), "trainer": trainer_settings(guest.cfg, guest.work, args),
            "lock": str(args.work / f"gpu{gpu}.lock"), "out": str(guest.work / "steps.json")},
            guest.work, gpu)
        now[gpu][guest.seed] = 0
        for seed in now[gpu]:
            now[gpu][seed] = max(now[gpu][seed], len(now[gpu]))
        print(f"seed {guest.seed}: started{f' on GPU {gpu}' if gpu else ''}", flush=True)
        while child.poll() is None and not over():
            time.sleep(0.2)
        took, most = time.monotonic() - began, now[gpu].pop(guest.seed)
        free.append(gpu)
        if child.poll() is None:
            kill_group(child)
            print(f"seed {guest.seed}: ended before its last step", flush=True)
        elif child.returncode:
            said = (guest.work / "learn.log").read_text()[-6000:]
            print(f"seed {guest.seed}: TRL failed\n{said}", flush=True)
        else:
            found = json.loads((guest.work / "steps.json").read_text())
            guest.trained.write_text(json.dumps({
                "seconds": took, "at_once": most, "start_s": found["first"] - found["waited"] - began,
                "steps": found["steps"], "begun": found["begun"]}))
            clock = sum(s["time/step_s"] for s in found["steps"])
            print(f"seed {guest.seed}: trained, {clock:.0f} s of steps", flush=True)

    with concurrent.futures.ThreadPoolExecutor(len(free)) as pool:
        try:
            for done in [pool.submit(one, guest) for guest in guests]:
                done.result()
        finally:
            ended.set()  # after an error or a signal the others end, too


def write_all(experiment: Experiment, guests: Sequence[Guest], args: argparse.Namespace, start: Any) -> None:
    """Judge the guests that are trained, and write the lines of each."""
    if not guests:
        return
    work = args.work / experiment.name
    child = start("judge", {"config": str(guests[0].config), "out": str(work), "folders": [
        [str(g.seed), step, folder] for g in guests for step, folder in g.folders().items()]}, work,
        next((gpu.name for gpu in gpus()), ""))
    if child.wait():
        sys.exit(f"our evaluation failed\n{(work / 'judge.log').read_text()[-6000:]}")
    judged = json.loads((work / "judged.json").read_text())
    for guest in guests:
        found, scores = json.loads(guest.trained.read_text()), judged["scores"][str(guest.seed)]
        records = [{"step": 0}, *found.pop("steps")]
        lines = [record | scores.get(str(record["step"]), {}) for record in records]
        write_lines(guest.lines, experiment, header(experiment, guest, args, judged["device"], found), lines)
        print(f"seed {guest.seed}: {guest.lines}", flush=True)


def header(experiment: Experiment, guest: Guest, args: argparse.Namespace, device: str,
           found: dict[str, Any]) -> dict[str, Any]:
    """The first of the lines: the keys of a cell's and of a guest's, and the trainer's settings."""
    r = guest.cfg.rollout
    differs = [text.format(microbatch=args.microbatch, memory=r.gpu_memory_utilization) for text in DIFFERS]
    own = {p: importlib.metadata.version(p) for p in ("trl", "accelerate", "datasets")}
    settings = trainer_settings(guest.cfg, Path(), args)
    return {
        "experiment": experiment.name, "cell": guest.lines.stem, "arm": {FOLDER: "trl"}, "seed": guest.seed,
        "pilot": False, "config": digest_of(guest.cfg), "protocol": experiment.digest, "ended": DONE,
        "steps": guest.cfg.run.steps, "seconds": round(found["seconds"], 1), "at_once": found["at_once"],
        "device": device, "commit": os.environ.get("JAXFP8RL_COMMIT", commit()),
        "versions": versions() | own, "begun": found["begun"],
        "title": f"{title(args.liger)}, BF16", "start_s": round(found["start_s"], 1),
        "differs": differs + [SAMPLES_WITHOUT_VLLM] * args.no_vllm,
        "settings": {k: v for k, v in settings.items() if k != "output_dir"},
    }


def compare(args: argparse.Namespace, experiment: Experiment, results: Path) -> None:
    """Write the JSON: the means over the seeds that guest and control both have."""
    grid = [r for r in read_results(results) if not r.header["pilot"]] if results.is_dir() else []
    outcomes = analysis.outcomes(experiment, grid)
    control = outcomes[analysis.control_name(experiment)]
    for guest in read_guests(experiment, results, grid, outcomes):
        if guest.results[0].header["arm"][FOLDER] != "trl":
            continue
        if not guest.paired:
            return print(f"no lines of the control in {results}: --out is not written")
        mean = lambda of, key, seeds=guest.paired: statistics.fmean(getattr(of[s], key) for s in seeds)
        figures = dict.fromkeys(("start", "end", "mean", "gain"), False) | {"minutes": True, "tokens": True}
        units = {"minutes": "min of steps", "tokens": "sampled"}
        case = f"{experiment.name}, {len(guest.paired)} seeds"
        rows = [row(case, key, units.get(key, experiment.protocol.outcome.metric), mean(control, key),
                    mean(guest.outcomes, key), guest.title, less) for key, less in figures.items()]
        headers = {r.header["cell"]: {k: r.header[k] for k in ("at_once", "seconds", "device", "commit")}
                   for r in (*grid, *guest.results) if r.header["seed"] in guest.paired}
        first = guest.results[0].header
        write(args.out, "trl_learns", rows, args.plot, differs=first["differs"], settings=first["settings"],
              difference=guest.difference, runs=headers,
              start_s=[r.header["start_s"] for r in guest.results])


if __name__ == "__main__":
    main()
