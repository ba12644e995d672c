"""Log-probabilities and entropy over a vocabulary, forward and backward, against the bare products, on one
GPU.

    jaxfp8rl bench logprob [--tokens 16384] [--tune]

Each case is one jitted call. "products": z = x w^T, dx = dz w, dw = dz^T x by XLA (cuBLAS), bfloat16, with z
and dz whole in memory: the unavoidable work; four products if the logits are computed twice. "checkpointed
chunks": `jax.checkpoint` of `log_softmax` in a `lax.map`, differentiated by JAX. Extra memory is the
compiler's figure for a call's temporaries besides arguments and results. Rounds rotate the order; results are
medians. --tune times kernels by their tiles and writes nothing.

Needs a Hopper GPU.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.common import arguments, row, write
from benchmarks.gemm import medians
from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.logprob import api, reference, sm90

TILES = {  # compared by --tune
    "pairs along M": sm90.Tiles(),
    "single": sm90.Tiles(cluster=""),
    "bands of 4": sm90.Tiles(band=4),
    "bands of 16": sm90.Tiles(band=16),
    "bands of 8 words": sm90.Tiles(band_axis=1),
    "128 words, six stages": sm90.Tiles(n=128, stages=6),
}
CALLS = 2
BLOCK = 8192  # words of d_logits in --tune
Inputs = tuple[Array, Array, Array, Array, Array]


def main() -> None:
    parser = arguments(__doc__, "logprob")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--words", type=int, default=151936)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    inputs = draw(args.tokens, args.words, args.width)
    if args.tune:
        tune(inputs, args.rounds)
        return
    f = {name: rounding_exact_jit(f) for name, f in (ours() | yardsticks()).items()}
    programs = compiled({name: f[name].lower(*inputs) for name in f})
    found = medians({name: (lambda i, p=p: jax.tree.leaves(p(*inputs))[0]) for name, p in programs.items()},
                    args.rounds, CALLS)
    extra = {name: p.memory_analysis().temp_size_in_bytes / 2**30 for name, p in programs.items()}
    for name in programs:
        print(f"{name:60} {1e3 * found[name]:8.2f} ms  {extra[name]:6.2f} GiB", flush=True)
    write(args.out, "logprob", rows(f"{args.tokens} x {args.words} x {args.width}", found, extra), args.plot)


def rows(case: str, found: dict[str, float], extra: dict[str, float]) -> list[dict]:
    made = []
    for name in ours():
        backward = name.endswith("forward and backward")
        names = ["three products", "four products"] if backward else ["one product"]
        if not name.startswith("half"):
            names.append("checkpointed chunks, " + ("forward and backward" if backward else "forward"))
        made += [row(f"{case}, {name}", "time", "ms", 1e3 * found[name], 1e3 * found[n], n, True)
                 for n in names]
        made.append(row(f"{case}, {name}", "extra memory", "GiB", extra[name], 1.5e9 / 2**30, "the aim",
                        True))
    return made


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def draw(tokens: int, words: int, width: int) -> Inputs:
    """x, w, targets, and cotangents of log-probability and entropy. Logits have a deviation of 3."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (words, width), jnp.bfloat16) * jnp.bfloat16(3 / width**0.5)
    targets = jax.random.randint(keys[2], (tokens,), 0, words)
    return x, w, targets, *(jax.random.normal(key, (tokens,)) for key in keys[3:])


def ours() -> dict[str, Callable]:
    found = {}
    for name, backend in (("kernel", "pallas"), ("XLA loop", "reference")):
        f = functools.partial(api.linear_logprob, backend=backend)
        found[f"{name}, forward"] = functools.partial(forward, f)
        found[f"{name}, forward and backward"] = functools.partial(both, f)
    half = lambda x, w, y: api.linear_logprob(x, w, y, jnp.arange(len(y)) % 2 == 0, backend="pallas")
    return found | {"half of the rows live, kernel, forward and backward": functools.partial(both, half)}


def forward(f: Callable, x: Array, w: Array, targets: Array, g: Array, h: Array):
    return f(x, w, targets)


def both(f: Callable, x: Array, w: Array, targets: Array, g: Array, h: Array):
    found, pull = jax.vjp(lambda x, w: f(x, w, targets), x, w)
    return found, pull((g, h))


def yardsticks() -> dict[str, Callable]:
    return {
        "one product": functools.partial(products, 1), "three products": functools.partial(products, 3),
        "four products": functools.partial(products, 4),
        "checkpointed chunks, forward": functools.partial(forward, checkpointed_chunks),
        "checkpointed chunks, forward and backward": functools.partial(both, checkpointed_chunks),
    }


def products(count: int, x: Array, w: Array, targets: Array, g: Array, h: Array):
    """The first product computes the logits, and its result also stands for their gradient. A fourth repeats
    the first, hidden from the compiler."""
    z = product(x, w)
    found = [z, reference.d_x(z, w).astype(x.dtype), reference.d_w(z, x)][:count]
    if count == 4:
        again, _ = jax.lax.optimization_barrier((w, found[1:]))
        found.append(product(x, again))
    return found


def product(x: Array, w: Array) -> Array:
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def checkpointed_chunks(x: Array, w: Array, targets: Array) -> tuple[Array, Array]:
    chunk = 2**25 // len(w)
    padded = jnp.pad(x, ((0, -len(x) % chunk), (0, 0))).reshape(-1, chunk, x.shape[1])
    chunks = padded, jnp.pad(targets, (0, -len(x) % chunk)).reshape(-1, chunk)

    @jax.checkpoint
    def one(chunk):
        logp = jax.nn.log_softmax(reference.logits(chunk[0], w))
        return jnp.take_along_axis(logp, chunk[1][:, None], -1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, -1)

    return tuple(a.reshape(-1)[: len(x)] for a in jax.lax.map(one, chunks))


def compiled(lowered: dict) -> dict:
    """The compiled programs, compiled in parallel."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values())))


def tune(inputs: Inputs, rounds: int) -> None:
    x, w, targets, g, h = inputs

    def gradient(x, w, targets, g, h, tiles):
        return sm90.d_logits(x, w[:BLOCK], targets, g + 12, g, h, h, 1.0, jnp.float32, tiles)

    def statistic(x, w, targets, g, h, tiles):
        return sm90.statistics(x, w, targets, 1.0, jnp.float32, tiles)

    cases = {f"statistics, {name}": functools.partial(statistic, tiles=t) for name, t in TILES.items()}
    cases |= {f"d_logits, {name}": functools.partial(gradient, tiles=t) for name, t in TILES.items()}
    cases |= {"product": lambda x, w, *_: product(x, w),
              "product of a block": lambda x, w, *_: product(x, w[:BLOCK])}
    start, lowered = time.perf_counter(), {}
    for name, f in cases.items():
        try:
            lowered[name] = rounding_exact_jit(f).lower(*inputs)
        except ValueError as e:
            print(f"{name}: {e}", flush=True)
    programs = compiled(lowered)
    print(f"compiled {len(programs)} in {time.perf_counter() - start:.0f} s", flush=True)
    found = medians({name: (lambda i, p=p: p(*inputs)) for name, p in programs.items()}, rounds, CALLS)
    for name, t in found.items():
        flops = 2 * x.size * (BLOCK if "block" in name or "d_logits" in name else len(w))
        print(f"{name:50} {1e3 * t:8.2f} ms {flops / t / 1e12:6.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
