"""The FP8 quantisers, alone and fused with the producer of their input, against a copy and against XLA's own
fusion.

    jaxfp8rl bench quantize

A kernel is bound by memory. Its rate is the bytes that it must read and write, once each, over its time. The
yardstick is the rate of a device-to-device copy (torch's if installed, otherwise XLA's). A program uses
several inputs in rotation, because the host's time for a single call would be visible. Rounds rotate the
order; results are medians.

Needs a GPU; torch for the copy.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import arguments, row, write
from benchmarks.gemm import QUEUED, as_graph, by_call, in_turns, medians
from pallas_kernels.fused_quantize import reference as activations
from pallas_kernels.fused_quantize import sm90 as fused
from pallas_kernels.quantize import reference, sm90

SHAPES = [(16384, 12288), (16384, 4096), (4096, 4096)]
TOKENS, D, F = 16384, 4096, 12288  # Qwen3-8B's
SETS = 2
EPS = 1e-6
E4M3 = sm90.Format(reference.E4M3, False, reference.AMAX_FLOOR)
FUSED = sm90.Format(reference.E4M3, False, reference.FUSED_AMAX_FLOOR)


class Case(NamedTuple):
    """`ours`, and XLA's version if it is compared, of bfloat16 arrays of these shapes; `size`: bytes to read
    and write without the scales."""

    name: str
    shapes: tuple[tuple[int, int], ...]
    size: int
    ours: Callable
    xla: Callable | None = None

    @property
    def floor(self) -> float:
        """An approximate lower bound in seconds."""
        return self.size / 4e12

    def __str__(self) -> str:
        return " and ".join(f"{m} x {n}" for m, n in self.shapes) + " bfloat16"


def naive(x: jax.Array):
    """A straightforward version: float32 divisions, without attention to the last bit."""
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, 128)
    scale = jnp.maximum(jnp.abs(groups).max(-1), reference.AMAX_FLOOR) / reference.E4M3_MAX
    return (groups / scale[..., None]).reshape(x.shape).astype(reference.E4M3), scale


def naive_both(x: jax.Array):
    return naive(x), naive(x.T)


def quantisers(shape: tuple[int, int]) -> list[Case]:
    n, quantize, blocks = shape[0] * shape[1], functools.partial(
        sm90.quantize, fmt=E4M3), sm90.quantize_blocks
    return [
        Case("rows", (shape,), 3 * n, quantize, naive),
        Case("tokens", (shape,), 3 * n, functools.partial(quantize, rows=False, tokens=True)),
        Case("rows and tokens", (shape,), 4 * n, functools.partial(quantize, tokens=True), naive_both),
        Case("blocks", (shape,), 3 * n, functools.partial(blocks, fmt=E4M3, transposed=False)),
        Case("blocks and transposed", (shape,), 4 * n, functools.partial(blocks, fmt=E4M3, transposed=True)),
    ]


def producers() -> list[Case]:
    """The fused cases. RMSNorm's bytes do not include the second read of x for its statistics: they are the
    minimum of a single pass."""
    x, h, joint = (TOKENS, D), (TOKENS, F), (TOKENS, 2 * F)
    n, m, found = TOKENS * D, TOKENS * F, []
    for also, tokens in (("", None), (" and tokens", E4M3)):
        more = 1 if tokens else 0
        norms = functools.partial(norm, tokens), functools.partial(xla_norm, tokens)
        found += [
            Case(f"RMSNorm, rows{also}", (x,), (3 + more) * n, *norms),
            Case(f"RMSNorm of a sum, rows{also}", (x, x), (7 + more) * n, *norms),
            Case(f"SwiGLU, rows{also}", (joint,), (5 + more) * m,
                 functools.partial(fused.swiglu, rows=FUSED, tokens=tokens),
                 functools.partial(xla_swiglu, tokens)),
        ]
    backward = lambda d_h, joint: naive_both(activations.swiglu_grad(d_h, joint))  # noqa: E731
    ours = functools.partial(fused.swiglu_grad, fmt=E4M3)
    return found + [Case("SwiGLU backward, rows and tokens", (h, joint), 10 * m, ours, backward)]


def norm(tokens, x: jax.Array, residual: jax.Array | None = None):
    inverse = activations.inverse_rms(activations.residual_sum(x, residual), EPS)[:, 0]
    return fused.rms_norm(x, inverse, jnp.ones(D), residual, FUSED, tokens, False)


def xla_norm(tokens, x: jax.Array, residual: jax.Array | None = None):
    normed = activations.rms_norm(x, jnp.ones(D), EPS, residual)
    total = () if residual is None else activations.residual_sum(x, residual).astype(jnp.bfloat16)
    return (naive_both if tokens else naive)(normed), total


def xla_swiglu(tokens, joint: jax.Array):
    h = activations.swiglu(joint)
    return (naive(h), naive(h.astype(jnp.bfloat16).T)) if tokens else naive(h)


def main() -> None:
    parser = arguments(__doc__, "quantize")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    groups = [quantisers(shape) for shape in SHAPES] + [[case] for case in producers()]
    write(args.out, "quantize", [r for group in groups for r in compare(group, args.rounds)], args.plot)


def compare(cases: list[Case], rounds: int) -> list[dict]:
    """Rows for cases on the same arrays."""
    sets = [draw(i, cases[0].shapes) for i in range(SETS)]
    turns = max(1, round(QUEUED / (SETS * cases[0].floor)))
    programs = {("ours", c): c.ours for c in cases} | {("XLA", c): c.xla for c in cases if c.xla}
    with ThreadPoolExecutor() as pool:
        compiled = dict(zip(programs,
                            pool.map(lambda f: in_turns(f, turns).lower(sets).compile(), programs.values())))
    runs = {key: by_call(program, sets, turns) for key, program in compiled.items()}
    runs["copy", None] = copy([xs[0] for xs in sets], turns)
    times = medians(runs, rounds, 2 * SETS * turns)
    sizes = {key: key[1].size if key[1] else 4 * sets[0][0].size for key in runs}
    rate = {key: sizes[key] / t / 1e12 for key, t in times.items()}
    shown = (f"{who} {case.name if case else ''} {rate[who, case]:.2f}" for who, case in rate)
    print(cases[0], " ".join(shown), "TB/s", flush=True)
    beside = [row(str(c), c.name, "TB/s", rate["ours", c], rate["copy", None], "copy") for c in cases]
    return beside + [row(str(c), c.name, "TB/s", rate["ours", c], rate["XLA", c], "XLA") for c in cases
                     if c.xla]


@functools.partial(jax.jit, static_argnums=1)
def draw(seed: int, shapes: tuple[tuple[int, int], ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))


def copy(xs: list, turns: int) -> Callable[[int], object]:
    try:
        import torch
    except ImportError:
        sets = [(x,) for x in xs]
        return by_call(in_turns(lambda x: -x, turns).lower(sets).compile(), sets, turns)
    tensors = [torch.from_dlpack(x) for x in xs]
    out = torch.empty_like(tensors[0])
    return as_graph(lambda i: out.copy_(tensors[i % SETS]), SETS * turns)


if __name__ == "__main__":
    main()
