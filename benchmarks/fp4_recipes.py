"""What each ingredient of training in FP4 is worth: the loss of a small language model under emulated
recipes.

    jaxfp8rl bench fp4_recipes [--seeds 4] [--steps 300]    # an hour on one CPU core

The numbers are rounded to FP4 and stay float32 (`jaxfp8rl.precision.fake_fp4`): this says nothing of speed.
The model is a decoder of LAYERS layers and WIDTH wide, trained from scratch on sums and differences of the
arithmetic task with their answers, digit by digit. All linears of its layers compute by the recipe;
embeddings, head, norms, attention and the optimiser are float32. The arms of a seed have the same initial
weights and see the same text. The result is the loss on held-out problems, nats a digit; a gap is to float32,
paired by seed.

The arms: the recipe of "Pretraining LLMs with NVFP4" (arXiv 2509.25149) whole, less one ingredient each, and
naive; W4A4 by 2501.17116, with and without its gradient estimator (DGE) and outlier compensation (OCC); and
MXFP4 with the fixes of 2605.20402.

Needs no GPU.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from jaxfp8rl.data.arithmetic import ArithmeticTask
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.precision.fake_fp4 import Fp4Recipe, dge_linear, fp4_linear

LAYERS, WIDTH, INNER, HEADS = 4, 64, 256, 4
ROWS, LENGTH, RATE = 8, 64, 4e-3
HELD_OUT = 128  # rows of text


class Arm(NamedTuple):
    """linear(x [T, K], w [N, K], key) -> [T, N] of the layers; the last `high` of them compute in float32."""

    linear: Callable[[Array, Array, Array], Array]
    high: int = 0


def float32(x: Array, w: Array, key: Array) -> Array:
    return x @ w.T


def bfloat16(x: Array, w: Array, key: Array) -> Array:
    return jax.lax.dot(x.astype(jnp.bfloat16), w.T.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def fp4(**changes: Any) -> Callable[[Array, Array, Array], Array]:
    return functools.partial(fp4_linear, Fp4Recipe(**changes))


def rowwise(*how: Any) -> Callable[[Array, Array, Array], Array]:
    return lambda x, w, key: dge_linear(*how, x, w)


PLAIN = {"square": False, "rotate": False, "stochastic": False}
MX = {"form": "mxfp4", "square": False, "rotate": False}
ARMS = {
    "float32": Arm(float32, LAYERS),
    "bfloat16": Arm(bfloat16, LAYERS),
    "nvfp4": Arm(fp4(), 1),
    "nvfp4, no stochastic rounding": Arm(fp4(stochastic=False), 1),
    "nvfp4, no rotation": Arm(fp4(rotate=False), 1),
    "nvfp4, no square blocks": Arm(fp4(square=False), 1),
    "nvfp4, last layer too": Arm(fp4(), 0),
    "nvfp4, no tensor scale": Arm(fp4(tensor_scale=False), 1),
    "nvfp4, naive": Arm(fp4(**PLAIN), 0),
    "rows, DGE and OCC": Arm(rowwise(True, 0.99, True)),
    "rows, DGE": Arm(rowwise(True, None, False)),
    "rows, OCC": Arm(rowwise(False, 0.99, True)),
    "rows, naive": Arm(rowwise(False, None, False)),
    "mxfp4": Arm(fp4(**MX)),
    "mxfp4, MBS": Arm(fp4(**MX, macro=True)),
    "mxfp4, OF": Arm(fp4(**MX, residual=True)),
    "mxfp4, MBS and OF": Arm(fp4(**MX, macro=True, residual=True)),
}
# recipes, of which the others lack parts
WHOLE = {"nvfp4": "nvfp4", "rows": "rows, DGE and OCC", "mxfp4": "mxfp4, MBS and OF"}


@functools.cache
def problems(split: str) -> tuple[list[np.ndarray], int]:
    """The tokens of each problem with its answer, and the size of the vocabulary."""
    task = ArithmeticTask(operands=2, operations=("+", "-"), size=20_000)
    tokenizer = load_tokenizer("chars:0123456789+-=;")
    found = task.problems() if split == "train" else task.held_out()
    return [np.array(tokenizer.encode(f"{p.prompt}{p.answer};"), np.int32)
            for p in found], tokenizer.vocab_size


def text(split: str, seed: int) -> Iterator[np.ndarray]:
    """Batches [ROWS, LENGTH + 1] of problems, one after the other in a random order."""
    found, rng, size, ids = problems(split)[0], np.random.default_rng(seed), ROWS * (LENGTH + 1), []
    while True:
        for i in rng.permutation(len(found)):
            ids.append(found[i])
            if len(ids) * 4 >= size and len(whole := np.concatenate(ids)) >= size:
                yield whole[:size].reshape(ROWS, LENGTH + 1)
                ids = []


def init(seed: int, words: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[-1])
    layer = {
        "q": draw(LAYERS, WIDTH, WIDTH), "kv": draw(LAYERS, 2 * WIDTH, WIDTH),
        "o": draw(LAYERS, WIDTH, WIDTH),
        "up": draw(LAYERS, 2 * INNER, WIDTH), "down": draw(LAYERS, WIDTH, INNER),
        "norms": jnp.ones((LAYERS, 2, WIDTH)),
    }
    return {"embed": 0.5 * jax.random.normal(next(keys), (words, WIDTH)), "head": draw(words, WIDTH),
            "layers": layer,
            "norm": jnp.ones(WIDTH)}


def normed(x: Array, gain: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def turned(x: Array) -> Array:
    """Rotary positions of heads [B, T, H, d]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 1000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)],
                           -1)


def loss(arm: Arm, params: dict[str, Any], rows: Array, key: Array) -> Array:
    """Mean cross-entropy of rows [B, T + 1], nats a token."""

    def layer(linear: Callable, x: Array, scanned: Any) -> tuple[Array, None]:
        w, key = scanned
        keys = jax.random.split(key, 5)
        apply = lambda i, h, w: linear(h.reshape(-1, h.shape[-1]), w, keys[i]).reshape(*h.shape[:-1], -1)
        h = normed(x, w["norms"][0])
        q, (k, v) = apply(0, h, w["q"]), jnp.split(apply(1, h, w["kv"]), 2, -1)
        heads = lambda h: h.reshape(*h.shape[:2], HEADS, -1)
        mixed = jax.nn.dot_product_attention(turned(heads(q)), turned(heads(k)), heads(v), is_causal=True)
        x = x + apply(2, mixed.reshape(x.shape), w["o"])
        gate, up = jnp.split(apply(3, normed(x, w["norms"][1]), w["up"]), 2, -1)
        return x + apply(4, jax.nn.silu(gate) * up, w["down"]), None

    x, low = params["embed"][rows[:, :-1]], LAYERS - arm.high
    keys = jax.random.split(key, LAYERS)
    for linear, part in ((arm.linear, slice(low)), (float32 if low else arm.linear, slice(low, None))):
        of_part = jax.tree.map(lambda w, part=part: w[part], (params["layers"], keys))
        if len(of_part[1]):
            x, _ = jax.lax.scan(functools.partial(layer, linear), x, of_part)
    logits = normed(x, params["norm"]) @ params["head"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]))


class Trained(NamedTuple):
    loss: float  # on held-out problems
    curve: list[float]  # the training loss, a mean of each tenth
    seconds: float


def trainer(arm: Arm, steps: int) -> Callable[[int], Trained]:
    """train(seed): AdamW, with a warm-up and a cosine to a tenth. All seeds share the compiled programs."""
    rate = optax.warmup_cosine_decay_schedule(0, RATE, max(steps // 20, 1), steps, RATE / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, 0.9, 0.95, weight_decay=0.01))

    @jax.jit
    def step(params: Any, state: Any, rows: Array, seed: Array, i: Array) -> Any:
        key = jax.random.key(seed, impl="unsafe_rbg")  # threefry would take most of the time
        found, gradient = jax.value_and_grad(functools.partial(loss, arm))(params, rows,
                                                                           jax.random.fold_in(key, i))
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, found

    score = jax.jit(lambda params, rows: loss(arm, params, rows, jax.random.key(0, impl="unsafe_rbg")))

    def train(seed: int) -> Trained:
        start, losses, rows = time.perf_counter(), [], text("train", seed)
        params = init(seed, problems("train")[1])
        state = optimizer.init(params)
        for i in range(steps):
            params, state, found = step(params, state, next(rows), jnp.int32(seed), jnp.int32(i))
            losses.append(found)
        held_out, tenth = text("held out", 10**6), max(steps // 10, 1)
        end = [float(score(params, next(held_out))) for _ in range(HELD_OUT // ROWS)]
        curve = [float(np.mean(losses[i : i + tenth])) for i in range(0, steps, tenth)]
        return Trained(statistics.fmean(end), curve, time.perf_counter() - start)

    return train


def interval(gaps: list[float]) -> tuple[float, float]:
    """Mean, and half of Student's 95% interval; infinite for one seed."""
    from scipy.stats import t

    n = len(gaps)
    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(gaps) / math.sqrt(n) if n > 1 else math.inf
    return statistics.fmean(gaps), half


def rows_of(runs: dict[str, dict[int, Trained]]) -> list[dict]:
    """For each arm its gap to float32, and how much worse it is than the whole recipe: means over the seeds,
    and the halves of their 95% intervals."""

    def rows(name: str, other: str) -> list[dict]:
        mean, half = interval([run.loss - runs[other][seed].loss for seed, run in runs[name].items()])
        made = lambda metric, value: row(name, metric, "nats a token", value, 0.0, other) | {"ratio": None}
        return [made("held-out loss less the other's", mean), made("half of the 95% interval of that", half)]

    found = []
    for name in (n for n in runs if n != "float32"):
        found += rows(name, "float32")
        if (whole := WHOLE.get(name.split(",")[0])) and whole != name and whole in runs:
            found += rows(name, whole)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "fp4_recipes")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), metavar="ARM",
                        help="some of them; float32 is always there")
    args = parser.parse_args(argv)
    if unknown := set(args.arms) - set(ARMS):
        parser.error(f"no arm {', '.join(sorted(unknown))}; there are: {'; '.join(ARMS)}")
    runs: dict[str, dict[int, Trained]] = {}
    as_json = lambda: {name: {seed: run._asdict() for seed, run in of.items()} for name, of in runs.items()}
    sizes = {"layers": LAYERS, "width": WIDTH, "inner": INNER, "tokens": ROWS * LENGTH, "steps": args.steps}
    for name in dict.fromkeys(["float32", *args.arms]):
        train = trainer(ARMS[name], args.steps)
        for seed in range(args.seeds):
            runs.setdefault(name, {})[seed] = found = train(seed)
            print(f"{name:32}  seed {seed}  {found.loss:.4f}  {found.seconds:.0f} s", flush=True)
        # what there is, if it is stopped
        args.out.write_text(json.dumps({"runs": as_json(), "model": sizes}))
    write(args.out, "fp4_recipes", rows_of(runs), args.plot, runs=as_json(), model=sizes)


if __name__ == "__main__":
    main()
