"""A learner on one, two, ... GPUs of a host: tokens per second of the update, for the same rows of the same
batch.

    jaxfp8rl bench scaling [--sizes 1.7b 8b] [--gpus 1 2 4] [--rows 4] [--axis fsdp] [--offload 8b:1]
    jaxfp8rl bench scaling --sizes 30b-a3b --layers 10 --gpus 1 2 4 --axis tensor      # divides the experts
    jaxfp8rl bench scaling --gpus 1 2 4 --keep runs/scaling    # what is there already is not run again

`train.fsdp` = N, or `train.data`, divides a batch of R rows over N GPUs as R / N micro-batches of N rows;
`train.tensor` divides the heads and widths of R micro-batches of one row. Every N therefore computes the same
losses; those of all updates are stored and compared. Efficiency is tokens per second over N times those of
the smallest N. The peak of memory is beside the plan of `--dry-run`. The timed program is that of
benchmarks/step.py. Runs execute concurrently as long as each has GPUs of its own. --offload SIZE:N: with N
GPUs this size keeps masters and moments in the host's memory, as the preset for one H100 does, because they
do not fit otherwise. --keep FOLDER: what a run found stays there, and is not measured again; one GPU alone is
the same for every axis.

Needs a Hopper GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import MIXTURES, SHAPES, arguments, config, require_gpu, row, write
from benchmarks.processes import kill_group, visible
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig

# The axes of jaxfp8rl.distributed.mesh, which is not imported, because JAX would reserve the GPUs' memory.
AXES = "data", "fsdp", "tensor"
# Tolerance of the losses, relative to the largest: another order of summation changes roundings, which a
# random network amplifies.
TOLERANCE = 0.02


def main() -> None:
    parser = arguments(__doc__, "scaling")
    parser.add_argument("--sizes", nargs="+", choices=[*SHAPES, *MIXTURES], default=["1.7b", "8b"])
    parser.add_argument("--layers", type=int, default=0, help="of the models; default: all")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=4,
                        help="rows of a batch, of --row-tokens each; every N must divide them")
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--recipe", default="fp8_unified")
    parser.add_argument("--axis", choices=AXES, default="fsdp", help="the axis of the GPUs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--remat", default="mlp", help="train.remat: %(default)s")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a run: %(default)s")
    parser.add_argument("--offload", nargs="*", default=[], metavar="SIZE:N")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="default: nothing is kept")
    args = parser.parse_args()
    require_gpu(__file__, "NVIDIA GPUs")
    failed: list[tuple[str, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        devices, all_runs = visible(max(args.gpus)), [(size, n) for n in args.gpus for size in args.sizes]
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
        outs = {run: Path(args.keep or folder, name_of(*run, args)) for run in all_runs}
        found = {run: json.loads(out.read_text()) for run, out in outs.items() if out.exists()}
        if found:
            kept(args, found, failed)
        for runs in side_by_side([run for run in all_runs if run not in found], len(devices)):
            children = {run: start(*run, devices[at : at + run[1]], outs[run], args)
                        for run, at in runs.items()}
            until = time.monotonic() + args.timeout
            for run, child in children.items():
                if ended(child, until):
                    found[run] = json.loads(outs[run].read_text())
                else:
                    failed.append(run)
            kept(args, found, failed)
    if failed:
        sys.exit(f"these runs failed or took too long, see above: {failed}")


def kept(args, found: dict[tuple[str, int], dict], failed: list[tuple[str, int]]) -> None:
    """Write what has been found so far."""
    rows = [r for size in args.sizes
            if (mine := {n: found[size, n] for n in args.gpus if (size, n) in found})
            for r in rows_of(size, args, mine)]
    each = {f"{size}, {n} GPUs": f for (size, n), f in found.items()}
    write(args.out, "scaling", rows, args.plot, each=each, recipe=args.recipe, axis=args.axis,
          remat=args.remat, offload=args.offload, failed=failed)


def name_of(size: str, n: int, args) -> str:
    """The file of a run, named by all that decides what it finds."""
    axis = args.axis if n > 1 else "one"
    told = size, args.layers, n, axis, args.rows, args.row_tokens, args.recipe, args.rounds, args.remat
    return "_".join(map(str, (*told, *(["offload"] if f"{size}:{n}" in args.offload else [])))) + ".json"


def ended(child: subprocess.Popen, until: float) -> bool:
    """Whether the run succeeded by then. One that did not end is killed: a device that runs out of memory
    leaves the others waiting for it."""
    try:
        return child.wait(max(1.0, until - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        kill_group(child)


def side_by_side(runs: list[tuple[str, int]], devices: int) -> list[dict[tuple[str, int], int]]:
    """Rounds of runs that execute concurrently, each with the first of the devices that are its own."""
    rounds: list[dict[tuple[str, int], int]] = []
    for run in sorted(runs, key=lambda run: run[1]):
        taken = sum(n for _, n in rounds[-1]) if rounds else devices
        if taken + run[1] > devices:
            rounds, taken = [*rounds, {}], 0
        rounds[-1][run] = taken
    return rounds


def start(size: str, n: int, devices: list[str], out: Path, args) -> subprocess.Popen:
    microbatches = args.rows // (1 if args.axis == "tensor" else n)
    command = [
        sys.executable, Path(__file__).with_name("step.py"), "--child", size, args.recipe, out,
        "--optim", "offload" if f"{size}:{n}" in args.offload else "low", "--rounds", args.rounds,
        f"--{args.axis}", n, "--microbatches", microbatches, "--row-tokens", args.row_tokens,
        "--remat", args.remat, "--layers", args.layers,
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices),
                                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
                                "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}  # in one piece
    return subprocess.Popen(list(map(str, command)), env=environment, start_new_session=True)


def rows_of(size: str, args, found: dict[int, dict]) -> list[dict]:
    """Rows of each N against N times the smallest."""
    least = min(found)
    rate = {n: args.rows * args.row_tokens / f["update"] * 1e3 for n, f in found.items()}
    rows = []
    for n, f in found.items():
        layers = f", {args.layers} layers" * bool(args.layers)
        case = f"Qwen3-{size.upper()}{layers}, {args.rows} x {args.row_tokens} tokens, {n} GPUs"
        beside = f"{least} GPU, per GPU"
        apart = max(abs(a - b) for a, b in zip(f["losses"], found[least]["losses"], strict=True))
        apart /= max(map(abs, found[least]["losses"]))  # a loss itself may pass through zero
        rows += [
            row(case, "update", "tokens/s", rate[n], rate[least] * n / least, beside),
            row(case, "peak memory, the first GPU", "GB", f["peak memory"], found[least]["peak memory"],
                f"{least} GPU", True),
            row(case, "peak memory, the first GPU", "GB", f["peak memory"], planned(size, n, args) / 1e9,
                "the plan", True),
            row(case, "losses of all updates, largest difference", "of the largest loss", apart, TOLERANCE,
                "tolerance", True),
        ]
    return rows


def planned(size: str, n: int, args) -> int:
    """Bytes of the plan of these devices and rows, for the first device."""
    from benchmarks.step import OPTIMIZERS

    optim = OPTIMIZERS["offload" if f"{size}:{n}" in args.offload else "low"]
    told = {"train.row_tokens": args.row_tokens, f"train.{args.axis}": n,
            "train.rows_per_microbatch": 1 if args.axis == "tensor" else n, "train.remat": args.remat,
            "precision.recipe": args.recipe,
            "precision.wgrad_inputs": "1x128", "rollout.kv_scales": "one",
            **{f"optim.{name}": value for name, value in optim.items()}}
    cfg = load_config("qwen3-8b-h200", [w for k, v in told.items() for w in (f"--{k}", str(v))])
    return sum(size for _, size in memory_plan(cfg, ModelConfig.from_hf(config(size, args.layers))))


if __name__ == "__main__":
    main()
