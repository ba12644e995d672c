"""All linears of a Qwen3-8B layer, forward and backward with every quantisation, by recipe, beside XLA's bfloat16, on one GPU.

    python benchmarks/linear.py [--out benchmarks/results/linear.json] [--tokens 16384]

Each case is one jitted call: q, k, v of one input, o, gate and up of one input, down; the pullback of all, with gradients of
weights in bfloat16 as a micro-batch leaves them. Rounds turn the order; medians.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import row, write
from benchmarks.gemm import seconds
from jaxfp8rl.exact import exact_jit
from jaxfp8rl.precision.linear import QuantizedWeight, TrainableWeight, linear
from jaxfp8rl.precision.recipe import Precision

INPUTS = {"attention": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "mlp": (4096, (12288, 12288)), "down": (12288, (4096,))}
CALLS = 4


def precision(products: str, **options) -> Precision:
    return Precision.uniform(1, "bfloat16", **{"products": products, "gradients": "e4m3"} | options)


CASES = {  # name: (FP8, precision)
    "fp8_unified": (True, precision("pallas")),
    "fp8_unified, saved in FP8": (True, precision("pallas", saved_activations="fp8")),
    "fp8_forward": (True, precision("pallas", gradients="high")),
    "bf16": (False, precision("float32", gradients="high")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/linear.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    write(args.out, "linear", [r for tokens in args.tokens for r in compare(tokens, args.rounds)])


def compare(tokens: int, rounds: int) -> list[dict]:
    drawn = draw(tokens)
    keys = [(what, name) for name in CASES for what in PASSES]
    with ThreadPoolExecutor() as pool:
        runs = dict(zip(keys, pool.map(lambda key: bind(PASSES[key[0]], CASES[key[1]], drawn), keys)))
    times: dict[tuple, list[float]] = {key: [] for key in keys}
    for turn in range(rounds):
        for key in keys[:: 1 if turn % 2 else -1]:
            times[key].append(seconds(runs[key], CALLS))
    ms = {key: 1e3 * statistics.median(t) for key, t in times.items()}
    print(tokens, "  ".join(f"{name}, {what} {t:.2f} ms" for (what, name), t in ms.items()), flush=True)
    case = f"Qwen3-8B layer's linears, {tokens} tokens"
    return [row(f"{case}, {name}", what, "ms", t, ms[what, "bf16"], "XLA bf16", True) for (what, name), t in ms.items()]


@functools.partial(jax.jit, static_argnums=0)
def draw(tokens: int) -> dict:
    """By input: x [T, K], weights [N, K] and output gradients [T, N], bfloat16."""
    keys = iter(jax.random.split(jax.random.key(0), 32))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    return {name: (normal(tokens, k), [normal(n, k) / 64 for n in ns], [normal(tokens, n) for n in ns])
            for name, (k, ns) in INPUTS.items()}  # fmt: skip


def forward(case: tuple[bool, Precision], drawn: dict, leaves: list) -> list:
    fp8, p = case
    xs, weights = leaves
    return [linear(x, w, p, fp8) for x, ws in zip(xs, weights) for w in ws]


def both(case: tuple[bool, Precision], drawn: dict, leaves: list) -> tuple:
    """Outputs, and gradients of every input and weight."""

    def run(xs, handles):
        weights = [[TrainableWeight(w, h) if case[0] else h for w, h in zip(*pair)] for pair in zip(leaves[1], handles)]
        return forward(case, drawn, [xs, weights])

    handles = [[jnp.zeros(w.codes.shape, jnp.bfloat16) if case[0] else w for w in ws] for ws in leaves[1]]
    y, pull = jax.vjp(run, leaves[0], handles)
    return y, pull([dy for _, _, dys in drawn.values() for dy in dys])


PASSES = {"forward": forward, "forward and backward": both}


def bind(f, case: tuple[bool, Precision], drawn: dict):
    """The weights are quantised before, as they are once an update, not once a micro-batch."""
    of = jax.jit(QuantizedWeight.of) if case[0] else (lambda w: w)
    leaves = [x for x, _, _ in drawn.values()], [[of(w) for w in ws] for _, ws, _ in drawn.values()]
    compiled = exact_jit(functools.partial(f, case)).lower(drawn, leaves).compile()
    return lambda i: jax.tree.leaves(compiled(drawn, leaves))[0]


if __name__ == "__main__":
    main()
