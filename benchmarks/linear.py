"""All linears of a Qwen3-8B layer, and its MLP with SwiGLU, forward and backward with every quantisation, by
recipe, against XLA's bfloat16, on one GPU.

    jaxfp8rl bench linear [--tokens 16384] [--parts linears MLP]

Each case is one jitted call: q, k, v of one input, o, gate and up of one input, down; then all their
gradients, those of weights in bfloat16 as for a micro-batch. Rounds rotate the order; results are medians.

Needs a GPU.
"""

from __future__ import annotations

import dataclasses
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
from benchmarks.gemm import medians
from jaxfp8rl.models.layers import swiglu
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import fused_linears, linear
from jaxfp8rl.precision.mlp import swiglu_mlp
from jaxfp8rl.precision.records import EngineRounding, Precision
from jaxfp8rl.precision.weights import QuantizedWeight, WeightWithGradSlot
from pallas_kernels.quantize.reference import FUSED_AMAX_FLOOR

Q, KV, D, F = 4096, 1024, 4096, 12288  # Qwen3-8B's
CALLS = 4


class Case(NamedTuple):
    """`outputs(xs, weights)`, with or without FP8 weights."""

    name: str
    fp8: bool
    outputs: Callable[[list, list], list]
    forward: bool = True  # whether to time the forward pass alone; not if another case has the same


def precision(products: str, **options) -> Precision:
    return Precision.uniform(1, "bfloat16", **{"products": products, "gradients": "e4m3"} | options)


def together(p: Precision) -> Callable:
    """q, k and v as in a decoder layer: in the backward pass the products of one input are joined."""
    return lambda xs, weights: [y for x, ws in zip(xs, weights) for y in fused_linears(x, ws, p)]


def one_by_one(p: Precision, fp8: bool = True, own: Callable = lambda x, w: x) -> Callable:
    return lambda xs, weights: [linear(own(x, w), w, p, fp8) for x, ws in zip(xs, weights) for w in ws]


def unlike(x: jax.Array, w: QuantizedWeight | WeightWithGradSlot) -> jax.Array:
    """x as an array that XLA cannot identify with x, for every w."""
    return jax.lax.optimization_barrier((x, jax.tree.leaves(w)[0]))[0]


def mlp(p: Precision, fp8: bool = True) -> Callable:
    """The MLP as in a decoder layer, product by product."""

    def outputs(xs: list, weights: list) -> list:
        (x,), ((gate, up, down),) = xs, weights
        product = lambda x, w: linear(x, w, p, fp8, FUSED_AMAX_FLOOR)
        return [product(swiglu(product(x, gate), product(x, up), p.rounding.fused), down)]

    return outputs


UNIFIED, HIGH = precision("pallas"), precision("float32", gradients="high")
FUSED = precision("pallas", rounding=EngineRounding(fused=True, fused_quantizer=True))  # as compiled vLLM
SQUARE = dataclasses.replace(FUSED, wgrad_inputs="128x128")
PARTS = {
    "linears": [
        Case("fp8_unified", True, one_by_one(UNIFIED)),
        Case("fp8_unified, products of one input together", True, together(UNIFIED), False),
        Case("fp8_unified, an input quantised for each product", True, one_by_one(UNIFIED, own=unlike),
             False),
        Case("fp8_unified, wgrad's inputs in 128x128", True,
             one_by_one(precision("pallas", wgrad_inputs="128x128")), False),
        Case("fp8_unified, saved in FP8", True, one_by_one(precision("pallas", saved_activations="fp8")),
             False),
        Case("fp8_forward", True, one_by_one(precision("pallas", gradients="high")), False),
        Case("bf16", False, one_by_one(HIGH, fp8=False)),
    ],
    "MLP": [
        Case("fp8_unified", True, lambda xs, weights: [swiglu_mlp(*xs, *weights[0], FUSED)]),
        Case("fp8_unified, wgrad's inputs in 128x128", True,
             lambda xs, weights: [swiglu_mlp(*xs, *weights[0], SQUARE)], False),
        Case("fp8_unified, SwiGLU apart from the quantisers", True, mlp(FUSED)),
        Case("bf16", False, mlp(HIGH, fp8=False)),
    ],
}


def main() -> None:
    parser = arguments(__doc__, "linear")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        for part in args.parts:
            rows += compare(part, tokens, args.rounds)
            write(args.out, "linear", rows, args.plot)


def compare(part: str, tokens: int, rounds: int) -> list[dict]:
    drawn = draw(part, tokens)
    pairs = [(what, case) for what in PASSES for case in PARTS[part] if case.forward or what != "forward"]
    with ThreadPoolExecutor() as pool:
        runs = {(what, case.name): run
                for (what, case), run in zip(pairs, pool.map(lambda pair: bind(*pair, drawn), pairs))}
    ms = {key: 1e3 * time for key, time in medians(runs, rounds, CALLS).items()}
    case = f"Qwen3-8B layer's {part}, {tokens} tokens"
    return [row(f"{case}, {name}", what, "ms", t, ms[what, "bf16"], "XLA bf16", True)
            for (what, name), t in ms.items()]


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(part: str, tokens: int) -> tuple[list, list, list]:
    """Inputs [T, K], the weights [N, K] of each, and gradients of outputs [T, N], bfloat16."""
    keys = iter(jax.random.split(jax.random.key(0), 32))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    if part == "linears":
        shapes = [(D, (Q, KV, KV)), (Q, (D,)), (D, (F, F)), (F, (D,))]
        widths, weights = [k for k, _ in shapes], [[normal(n, k) / 64 for n in ns] for k, ns in shapes]
        outputs = [n for _, ns in shapes for n in ns]
    else:
        widths, weights, outputs = [D], [[normal(*shape) / 64 for shape in ((F, D), (F, D), (D, F))]], [D]
    return [normal(tokens, k) for k in widths], weights, [normal(tokens, n) for n in outputs]


def forward(case: Case, xs: list, weights: list, dys: list) -> list:
    return case.outputs(xs, weights)


def both(case: Case, xs: list, weights: list, dys: list) -> tuple:
    """Outputs, and gradients of every input and weight."""

    def run(xs: list, grad_slots: list) -> list:
        return case.outputs(xs, [list(map(WeightWithGradSlot, *pair)) for pair in zip(weights, grad_slots)]
                            if case.fp8 else grad_slots)

    grad_slots = [[jnp.zeros(w.codes.shape, jnp.bfloat16) for w in ws]
               for ws in weights] if case.fp8 else weights
    y, pull = jax.vjp(run, xs, grad_slots)
    return y, pull(dys)


PASSES = {"forward": forward, "forward and backward": both}


def bind(what: str, case: Case, drawn: tuple) -> Callable[[int], jax.Array]:
    """The program bound to its operands. Weights are quantised beforehand, which happens once per update, not
    once per micro-batch."""
    xs, weights, dys = drawn
    of = jax.jit(QuantizedWeight.of) if case.fp8 else (lambda w: w)
    args = xs, [[of(w) for w in ws] for ws in weights], dys
    compiled = rounding_exact_jit(functools.partial(PASSES[what], case)).lower(*args).compile()
    return lambda i: jax.tree.leaves(compiled(*args))[0]


if __name__ == "__main__":
    main()
