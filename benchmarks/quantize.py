"""The FP8 quantisers beside a copy of their input and beside XLA's own quantisation, in one process on one GPU.

    python benchmarks/quantize.py [--out benchmarks/results/quantize.json]

A kernel is bound by memory: its rate is the bytes it has to read and write, once each, over its time, and the yardstick is the
rate of a device-to-device copy (torch's where it is installed, else XLA's). Rounds turn the order and the inputs; medians.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import row, write
from benchmarks.gemm import seconds
from pallas_kernels.quantize import reference, sm90

SHAPES = [(16384, 12288), (16384, 4096), (4096, 4096)]
SETS, CALLS = 2, 20
E4M3 = sm90.Format(reference.E4M3, False, reference.AMAX_FLOOR)
KERNELS = {  # name: (function, bytes an element of bfloat16, scales left out)
    "rows": (functools.partial(sm90.quantize, fmt=E4M3), 3),
    "tokens": (functools.partial(sm90.quantize, fmt=E4M3, rows=False, tokens=True), 3),
    "rows and tokens": (functools.partial(sm90.quantize, fmt=E4M3, tokens=True), 4),
    "blocks": (functools.partial(sm90.quantize_blocks, fmt=E4M3, transposed=False), 3),
    "blocks and transposed": (functools.partial(sm90.quantize_blocks, fmt=E4M3, transposed=True), 4),
}


def naive(x: jax.Array):
    """What one would write: float32 divisions, and no care for the last place."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, 128)
    scale = jnp.maximum(jnp.abs(groups).max(-1), reference.AMAX_FLOOR) / reference.E4M3_MAX
    return (groups / scale[..., None]).reshape(x.shape).astype(reference.E4M3), scale


XLA = {
    "rows": (naive, 3),
    "rows and tokens": (lambda x: (naive(x), naive(x.T)), 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/quantize.json")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = [r for shape in SHAPES for r in compare(shape, args.rounds)]
    write(args.out, "quantize", rows)


def compare(shape: tuple[int, int], rounds: int) -> list[dict]:
    xs = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(SETS)]
    runs = {("ours", name): (compiled(f, xs), size) for name, (f, size) in KERNELS.items()}
    runs |= {("XLA", name): (compiled(f, xs), size) for name, (f, size) in XLA.items()} | {("copy", ""): (copy(xs), 4)}
    times: dict[tuple, list[float]] = {key: [] for key in runs}
    for turn in range(rounds):
        for key in list(runs)[:: 1 if turn % 2 else -1]:
            times[key].append(seconds(runs[key][0], CALLS))
    rate = {key: runs[key][1] * xs[0].size / statistics.median(t) / 1e12 for key, t in times.items()}
    case = f"{shape[0]} x {shape[1]} bfloat16"
    print(case, "  ".join(f"{' '.join(key).strip()} {value:.2f}" for key, value in rate.items()), "TB/s", flush=True)
    found = [row(case, name, "TB/s", v, rate["copy", ""], "copy") for (who, name), v in rate.items() if who == "ours"]
    return found + [row(case, name, "TB/s", rate["ours", name], v, "XLA") for (who, name), v in rate.items() if who == "XLA"]


def compiled(f, xs: list):
    g = jax.jit(f).lower(xs[0]).compile()
    return lambda i: jax.tree.leaves(g(xs[i % SETS]))[0]


def copy(xs: list):
    try:
        import torch
    except ImportError:
        return compiled(lambda x: -x, xs)
    tensors = [torch.from_dlpack(x) for x in xs]
    out = torch.empty_like(tensors[0])
    return lambda i: out.copy_(tensors[i % SETS])


if __name__ == "__main__":
    main()
