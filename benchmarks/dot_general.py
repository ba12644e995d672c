"""fp8_dot_general from bfloat16 weights, [N, K] and [K, N], against the learner's own linear, which quantises
the same weights in the same call, and XLA's bfloat16: a decoder layer's linears, forward and backward.

    jaxfp8rl bench dot_general [--tokens 4096 16384]

Each case is one jitted call with every quantisation: q, k, v of one input, o, gate and up of one input, down;
then all their gradients, those of weights in bfloat16. Rounds rotate the order; results are medians.

Needs a GPU.
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

from benchmarks.common import arguments, row, write
from benchmarks.gemm import medians
from benchmarks.linear import CALLS, draw, precision
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import linear
from pallas_kernels import fp8_dot_general

NK, KN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
LEARNERS = "the learner's linear, [N, K]"
LEARNER, HIGH = precision("pallas"), precision("float32", gradients="high")


class Case(NamedTuple):
    """`product(x, w)`, with w stored as [N, K], or as [K, N] if `turned`."""

    name: str
    product: Callable[[jax.Array, jax.Array], jax.Array]
    turned: bool = False


CASES = [
    Case("fp8_dot_general, [N, K]", lambda x, w: fp8_dot_general(x, w, NK, backend="pallas")),
    Case("fp8_dot_general, [K, N]", lambda x, w: fp8_dot_general(x, w, KN, backend="pallas"), True),
    Case(LEARNERS, lambda x, w: linear(x, w, LEARNER, True)),
    Case("bf16", lambda x, w: linear(x, w, HIGH, False)),
]


def forward(case: Case, xs: list, weights: list, dys: list) -> list:
    return [case.product(x, w) for x, ws in zip(xs, weights) for w in ws]


def both(case: Case, xs: list, weights: list, dys: list) -> tuple:
    """Outputs, and gradients of every input and weight."""
    y, pull = jax.vjp(lambda xs, weights: forward(case, xs, weights, dys), xs, weights)
    return y, pull(dys)


PASSES = {"forward": forward, "forward and backward": both}


def main() -> None:
    parser = arguments(__doc__, "dot_general")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        rows += compare(tokens, args.rounds)
        write(args.out, "dot_general", rows, args.plot)


def compare(tokens: int, rounds: int) -> list[dict]:
    drawn = draw("linears", tokens)
    pairs = [(what, case) for what in PASSES for case in CASES]
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda pair: bind(*pair, drawn), pairs)
        runs = {(what, case.name): run for (what, case), run in zip(pairs, compiled)}
    ms = {key: 1e3 * time for key, time in medians(runs, rounds, CALLS).items()}
    return [beside(f"Qwen3-8B layer's linears, {tokens} tokens", *key, ms) for key in ms]


def beside(layer: str, what: str, name: str, ms: dict[tuple, float]) -> dict:
    """A row of `fp8_dot_general` against the learner's linear, and of the learner's linear against XLA's
    bfloat16."""
    yardstick = LEARNERS if name.startswith("fp8_dot_general") else "bf16"
    return row(f"{layer}, {name}", what, "ms", ms[what, name], ms[what, yardstick], yardstick, True)


def bind(what: str, case: Case, drawn: tuple) -> Callable[[int], jax.Array]:
    """The program bound to its operands, with weights in the case's layout before the clock starts."""
    xs, weights, dys = drawn
    args = xs, jax.tree.map(jax.jit(lambda w: w.T), weights) if case.turned else weights, dys
    compiled = rounding_exact_jit(functools.partial(PASSES[what], case)).lower(*args).compile()
    return lambda i: jax.tree.leaves(compiled(*args))[0]


if __name__ == "__main__":
    main()
