"""The mixture of experts of a layer of Qwen3-30B-A3B, forward and backward, FP8 against BF16, in one process
on one GPU.

    jaxfp8rl bench moe [--tokens 16384]

128 experts of 2048 -> 768 -> 2048, 8 per token: router, dispatch, products, SwiGLU and the sum over experts,
as in a training step. Routers are random, so experts have unequal loads. BF16's products are JAX's own
grouped kernels. The router and the dispatch, which both share, are also timed alone. Rounds rotate the order;
results are medians.

Needs a Hopper GPU.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.common import arguments, row, write
from benchmarks.grouped import measure
from jaxfp8rl.models.config import Experts
from jaxfp8rl.models.moe import moe_block
from jaxfp8rl.precision.experts import combine_tokens, dispatch, dispatch_tokens
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import QuantizedWeight, grad_slots_of, trainable

WIDTH, EXPERTS = 2048, Experts(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                               norm_topk_prob=True)
PRECISIONS = {
    "FP8": Precision((), products="pallas", gradients="e4m3"),
    "BF16": Precision((), products="pallas"),
}


def main() -> None:
    parser = arguments(__doc__, "moe")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        rows += compare(tokens, args.rounds)
        write(args.out, "moe", rows, args.plot)


def compare(tokens: int, rounds: int) -> list[dict]:
    weights = {name: draw(name == "FP8", tokens) for name in PRECISIONS}
    keys = [(name, what) for name in PRECISIONS for what in PASSES]
    programs = {(name, what): rounding_exact_jit(functools.partial(PASSES[what], PRECISIONS[name]))
                for name, what in keys}
    programs["FP8", MOVES] = rounding_exact_jit(moves)
    compiled = {key: f.lower(*weights[key[0]]).compile() for key, f in programs.items()}
    runs = {key: lambda i, f=f, w=weights[key[0]]: jax.tree.leaves(f(*w))[0] for key, f in compiled.items()}
    ms = {key: 1e3 * time for key, time in measure(runs, rounds).items()}
    case = f"{tokens} tokens, {EXPERTS.num_experts_per_tok} of {EXPERTS.num_experts} experts"
    rows = [row(case, what, "ms", ms["FP8", what], ms["BF16", what], "BF16", True) for what in PASSES]
    return [*rows, row(case, MOVES, "ms", ms["FP8", MOVES], ms["FP8", "forward"], "FP8 forward", True)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(fp8: bool, tokens: int) -> tuple:
    """A layer's weights, their handles for differentiation, its input and its result's gradient [1, T, D]."""
    keys = iter(jax.random.split(jax.random.key(0), 6))
    random = lambda *shape: 0.02 * jax.random.normal(next(keys), shape, jnp.bfloat16)
    E, D, F = EXPERTS.num_experts, WIDTH, EXPERTS.moe_intermediate_size
    experts = {"gate_proj": random(E, F, D), "up_proj": random(E, F, D), "down_proj": random(E, D, F)}
    of = {name: {"weight": QuantizedWeight.of(w) if fp8 else w} for name, w in experts.items()}
    weights = {"gate": {"weight": random(E, D)}, "experts": of}
    x, dy = (50 * random(1, tokens, D) for _ in range(2))
    return weights, grad_slots_of(weights, "bfloat16"), x, dy


def forward(precision: Precision, weights: dict, grad_slots: dict, x: Array, dy: Array) -> Array:
    fp8 = isinstance(weights["experts"]["up_proj"]["weight"], QuantizedWeight)
    return moe_block(x, trainable(weights, grad_slots), EXPERTS, precision, fp8)[0]


def both(precision: Precision, weights: dict, grad_slots: dict, x: Array, dy: Array) -> tuple:
    y, pull = jax.vjp(lambda grad_slots, x: forward(precision, weights, grad_slots, x, dy), grad_slots, x)
    return y, pull(dy)


def moves(weights: dict, grad_slots: dict, x: Array, dy: Array) -> Array:
    """Routing, and the moves of tokens to their rows and back, without a product."""
    logits = jnp.einsum("td,ed->te", x[0].astype(jnp.float32), weights["gate"]["weight"].astype(jnp.float32))
    d = dispatch(jax.lax.top_k(logits, EXPERTS.num_experts_per_tok)[1], EXPERTS.num_experts)
    return jnp.sum(combine_tokens(dispatch_tokens(x[0], d), d), 1)


PASSES = {"forward": forward, "forward and backward": both}
MOVES = "router, dispatch and copies alone"

if __name__ == "__main__":
    main()
