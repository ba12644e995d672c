"""A learner on one, two, ... GPUs of a host: tokens per second of the update, for the same rows of the same
batch.

    jaxfp8rl bench scaling [--sizes 1.7b 8b] [--gpus 1 2] [--rows 4] [--axis fsdp]

`train.fsdp` = N, or `train.data`, divides a batch of R rows over N GPUs as R / N micro-batches of N rows;
`train.tensor` divides the heads and widths of R micro-batches of one row. Every N therefore computes the same
losses; those of all updates are stored and compared. Efficiency is tokens per second over N times those of
the smallest N. The timed program is that of benchmarks/step.py. Runs on one GPU execute concurrently, each on
its own GPU.

Needs a Hopper GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import SHAPES, arguments, row, write

# The axes of jaxfp8rl.distributed.mesh, which is not imported, because JAX would reserve the GPUs' memory.
AXES = "data", "fsdp", "tensor"
# Relative tolerance of the losses: another order of summation changes roundings, which a random network
# amplifies.
TOLERANCE = 0.02


def main() -> None:
    parser = arguments(__doc__, "scaling")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["1.7b", "8b"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=4,
                        help="rows of a batch, of --row-tokens each; every N must divide them")
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--recipe", default="fp8_unified")
    parser.add_argument("--axis", choices=AXES, default="fsdp", help="the axis of the GPUs")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    if not shutil.which("nvidia-smi"):  # asking JAX would reserve the GPU memory that the runs need
        sys.exit("benchmarks/scaling.py needs NVIDIA GPUs")
    found = {(size, n): None for n in args.gpus for size in args.sizes}
    with tempfile.TemporaryDirectory() as folder:
        for runs in side_by_side(list(found), devices := visible(max(args.gpus))):
            outs = {run: Path(folder, "{}_{}".format(*run)) for run in runs}
            children = [start(*run, devices[at : at + run[1]], outs[run], args)
                        for at, run in enumerate(runs)]
            if any([child.wait() for child in children]):
                sys.exit("a run failed: see above")
            found |= {run: json.loads(out.read_text()) for run, out in outs.items()}
    rows = [r for size in args.sizes for r in rows_of(size, args, {n: found[size, n] for n in args.gpus})]
    each = {f"{size}, {n} GPUs": f for (size, n), f in found.items()}
    write(args.out, "scaling", rows, args.plot, each=each, recipe=args.recipe, axis=args.axis)


def visible(count: int) -> list[str]:
    """The first `count` GPUs, as in CUDA_VISIBLE_DEVICES."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(count)]


def side_by_side(runs: list[tuple[str, int]], devices: list[str]) -> list[list[tuple[str, int]]]:
    """Execute runs on one GPU concurrently, as many as there are devices; the others one after the other."""
    alone = [run for run in runs if run[1] == 1]
    together = [alone[i : i + len(devices)] for i in range(0, len(alone), len(devices))]
    return together + [[run] for run in runs if run[1] > 1]


def start(size: str, n: int, devices: list[str], out: Path, args) -> subprocess.Popen:
    microbatches = args.rows // (1 if args.axis == "tensor" else n)
    command = [
        sys.executable, Path(__file__).with_name("step.py"), "--child", size, args.recipe, out, "--optim",
        "low", "--rounds",
        args.rounds, f"--{args.axis}", n, "--microbatches", microbatches, "--row-tokens", args.row_tokens,
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(devices),
                                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    return subprocess.Popen(list(map(str, command)), env=environment)


def rows_of(size: str, args, found: dict[int, dict]) -> list[dict]:
    """Rows of each N against N times the smallest."""
    least = min(found)
    rate = {n: args.rows * args.row_tokens / f["update"] * 1e3 for n, f in found.items()}
    rows = []
    for n, f in found.items():
        case, beside = f"Qwen3-{size.upper()}, {args.rows} x {args.row_tokens} tokens, {n} GPUs", f"{least} GPU, per GPU"
        apart = max(abs(a - b) / max(abs(b), 1e-3)
                    for a, b in zip(f["losses"], found[least]["losses"], strict=True))
        rows += [
            row(case, "update", "tokens/s", rate[n], rate[least] * n / least, beside),
            row(case, "peak memory, the first GPU", "GB", f["peak memory"], found[least]["peak memory"],
                f"{least} GPU", True),
            row(case, "losses of all updates, largest difference", "of the loss", apart, TOLERANCE,
                "tolerance", True),
        ]
    return rows


if __name__ == "__main__":
    main()
