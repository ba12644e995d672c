"""A decoder layer of Qwen3-8B over packed tokens, forward and backward, with attention by the kernels and by
XLA, on one GPU.

    jaxfp8rl bench layer [--tokens 16384 ...] [--segments 16]

In bfloat16 and in FP8 (fp8_unified, fused as in compiled vLLM); lengths are those of `jaxfp8rl bench
attention`. The yardsticks are the same layer with cuDNN's attention, causal over the whole row (more work,
and a different result; nothing else in JAX avoids scores of [T, T]), and with a mask while the scores fit
into SCORES bytes. The backward pass computes gradients of the input and of all weights. Rounds rotate the
order; results are medians.

Needs a Hopper GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.attention import packed
from benchmarks.common import arguments, config, row, write
from benchmarks.grouped import measure
from benchmarks.step import precision_of
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.layers import UnfusedResidual
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import packed_attention
from jaxfp8rl.policy.policy import grad_slots, policy_of
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import trainable

MODEL = ModelConfig.from_hf(config("8b", 1) | {"vocab_size": 128, "tie_word_embeddings": True})
RECIPES = "bf16", "fp8_unified"
SCORES = 8 * 2**30  # bytes of float32 scores [H, T, T]
OURS = "ours"


def main() -> None:
    parser = arguments(__doc__, "layer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 4096])
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows = []
    for tokens in args.tokens:
        for recipe in RECIPES:
            rows += compare(recipe, tokens, args.segments, args.rounds)
            write(args.out, "layer", rows, args.plot,
                  lengths={t: packed(t, args.segments).lengths for t in args.tokens})


def compare(recipe: str, tokens: int, segments: int, rounds: int) -> list[dict]:
    ids, case = packed(tokens, segments).ids(), f"{recipe}, {tokens} tokens, {segments} segments"
    attentions = {OURS: ("pallas", None), "cuDNN, causal over the row": ("xla", causal_over_the_row)}
    if 4 * MODEL.num_attention_heads * tokens**2 <= SCORES:
        attentions["XLA with a mask"] = ("xla", None)
    precision = precision_of(MODEL, recipe)
    precisions = {name: dataclasses.replace(precision, attention=attention)
                  for name, (attention, _) in attentions.items()}
    arguments = draw(precisions[OURS], tokens)
    program = lambda name, what: rounding_exact_jit(
        functools.partial(what, precisions[name], attentions[name][1]))
    keys = [(name, what) for name in attentions for what in PASSES]
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda key: program(key[0], PASSES[key[1]]).lower(*arguments, ids).compile(),
                            keys)
        runs = {key: lambda i, f=f: jax.tree.leaves(f(*arguments, ids))[0] for key, f in zip(keys, compiled)}
    ms = {key: 1e3 * time for key, time in measure(runs, rounds).items()}
    return [row(case, what, "ms", ms[OURS, what], t, name, True) for (name, what), t in ms.items()
            if name != OURS]


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(precision: Precision, tokens: int) -> tuple:
    """The policy, its handles for differentiation, the layer's input and its result's gradient [1, T, D]."""
    keys = jax.random.split(jax.random.key(0), 3)
    policy = policy_of(init_params(MODEL, keys[0], jnp.bfloat16), precision)
    x, dy = (jax.random.normal(key, (1, tokens, MODEL.hidden_size), "bfloat16") for key in keys[1:])
    if precision.rounding.fused:
        x, dy = UnfusedResidual(x, jnp.zeros_like(x)), UnfusedResidual(dy, dy)
    return policy, grad_slots(policy, "bfloat16"), x, dy


def forward(precision: Precision, attend: Callable | None, policy: dict, leaves: dict, x: Array, dy: Array,
            ids: Array) -> Array:
    weights = jax.tree.map(lambda stack: stack[0], trainable(policy, leaves)["layers"][0])
    rope, packed = packed_attention(positions_of(ids), ids, MODEL, precision)()
    return DecoderLayer(MODEL, precision, precision.runs[0], rope, attend or packed)(x, weights)[0]


def both(precision: Precision, attend: Callable | None, policy: dict, leaves: dict, x: Array, dy: Array,
         ids: Array) -> tuple:
    y, pull = jax.vjp(lambda leaves, x: forward(precision, attend, policy, leaves, x, dy, ids), leaves, x)
    return y, pull(dy)


PASSES = {"forward": forward, "forward and backward": both}


def positions_of(ids: Array) -> Array:
    """[B, T]: positions from 0 in every segment."""
    at = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    begins = jnp.where(jnp.diff(ids, axis=1, prepend=-1) != 0, at, 0)
    return at - jax.lax.cummax(begins, axis=1)


def causal_over_the_row(q: Array, k: Array, v: Array) -> tuple[Array, None]:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn"), None


if __name__ == "__main__":
    main()
