"""Costs and savings of each format of the optimiser's states: bytes, temporaries, time, and learning, against
float32.

    jaxfp8rl bench optimizer [--steps 300] [--seeds 3]
    jaxfp8rl bench optimizer --floor        updates alone, against a copy of their bytes: seconds, on a GPU

Ten minutes on two CPU cores. Learning: the demo's supervised warm start from random weights, with the same
examples and the same start for every format of a seed; a loss is the mean of the last tenth of the steps. The
task adds two numbers: with the demo's three the loss stays on a plateau for a while, whose length varies as
much between any two roundings as between seeds. The FP8 second moment is not a setting of `optim`; it is
included to show the reason. Small learning rates: weights of sigma 0.02 with updates that all point one way.
Time and temporaries: updates alone of a stack of layers, against optax.adamw.

Needs no GPU.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from jaxfp8rl.config.learning import Optim
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.optim.adamw import FAINT, Formats, Optimizer, adamw
from jaxfp8rl.optim.guard import from_optax, guarded_update, init_state
from jaxfp8rl.optim.low_bit import Stored, decode, encode, is_scaled, nbytes, random_bits, zeros
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.rollout.problems import load_data
from jaxfp8rl.training.step import make_logprobs, make_policy
from jaxfp8rl.training.warm_start import make_sft_step, optim_of
from jaxfp8rl.types import Params, StepMetrics, TrainBatch, TrainState

FLOAT32 = Formats()
LEAST = Formats("bfloat16", "float8", "bfloat16")
FP8_LM, FAILS = Formats("float32", "float8", "float16"), Formats("float32", "float8", "float8")
KEPT = (
    Formats("float32", "bfloat16", "bfloat16"),
    Formats("float32", "float8", "bfloat16"),
    FP8_LM,
    Formats("bfloat16", "bfloat16", "bfloat16"),
    LEAST,
    Formats("float16", "float8", "float16"),
)
LEARNING = [(FLOAT32, False), *((f, False) for f in KEPT if f.first == "float8"), (FAILS, False),
            (FAILS, True)]
LAYER = {"cpu": (512, 1536), "gpu": (4096, 12288)}  # width, hidden width; on a GPU Qwen3-8B's
LAYERS, UPDATES = 8, 10


def main() -> None:
    parser = arguments(__doc__, "optimizer")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--floor", action="store_true")
    args = parser.parse_args()
    if args.floor:
        write(args.out, "optimizer", list(floor_rows()), args.plot)
        return
    rows, curves = [*memory_rows(), *drift_rows(), *step_rows()], {}
    write(args.out, "optimizer", rows, args.plot)
    rows += update_rows()
    write(args.out, "optimizer", rows, args.plot)
    for found, losses in learning(args.steps, args.seeds):
        rows += found
        curves |= losses
        write(args.out, "optimizer", rows, args.plot, losses=curves)


def name(formats: Formats) -> str:
    return f"masters {formats.master}, moments {formats.first} and {formats.second}"


# Memory
# ------------------------------------------------------------------------------------------------------------


def memory_rows() -> Iterator[dict]:
    """Rows for a linear of Qwen3-8B, 4096 wide. A width that is not a multiple of 128 has one more scale per
    row."""
    shape = (12288, 4096)
    for formats in (FLOAT32, *KEPT):
        size = sum(nbytes(shape, kept_as) for kept_as in formats[:3]) / (shape[0] * shape[1])
        yield row(name(formats), "masters and moments", "bytes a parameter", size, 12, "float32", True)


# Small learning rates
# --------------------------------------------------------------------------------------------------


def drift_rows(updates: int = 1000, lr: float = 1e-6) -> Iterator[dict]:
    """The share of the distance `updates` times `lr` that weights cover, the mean of 65,536 weights."""
    start = jnp.asarray(0.02 * np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
    grads = {"w": jnp.ones((256, 256))}
    for master in ("float32", "bfloat16", "float16"):
        cfg = Optim(lr=lr, clip_norm=1e9)
        optimizer = adamw(cfg, make_schedule(cfg, updates), Formats(master))
        update = rounding_exact_jit(
            lambda state, o=optimizer: guarded_update(o, state, jnp.float32(0), grads)[0],
                           donate_argnums=0)
        state, nearest = init_state({"w": jnp.copy(start)}, optimizer), encode(start, master)
        begin = [np.asarray(decode(kept), np.float64) for kept in (state.params["w"], nearest)]
        to_nearest = rounding_exact_jit(lambda kept, m=master: encode(decode(kept) - lr, m))
        for _ in range(updates):
            state, nearest = update(state), to_nearest(nearest)
        after = [np.asarray(decode(kept), np.float64) for kept in (state.params["w"], nearest)]
        ours, theirs = (float(np.mean(b - a)) / (updates * lr) for a, b in zip(after, begin))
        case = f"{updates} updates at a learning rate of {lr:g}, masters {master}"
        yield row(case, "share of the way gone", "of 1", ours, theirs, "the same, rounded to nearest")


# What a second moment of few bits does
# ---------------------------------------------------------------------------------


def step_rows(updates: int = 20) -> Iterator[dict]:
    """Steps of 65,536 weights whose gradients vary within a block: log-normal with sigma 3, the largest of
    128 a thousand times the median. Adam's own largest step is about 1 learning rate. A weight that keeps up
    moves at least half as far as in float32."""
    rng = np.random.default_rng(0)
    size = 1e-3 * np.exp(3 * rng.normal(size=(256, 256)))
    grads = [jnp.asarray(size * rng.normal(size=size.shape), jnp.float32) for _ in range(updates)]
    plain = adam_steps(kept_adam(FLOAT32), grads)
    for formats in (FLOAT32,
                    *(Formats("float32", "float8", second) for second in ("bfloat16", "float16", "float8"))):
        ours, nearest = (adam_steps(kept_adam(formats, to_nearest=n), grads) for n in (False, True))
        case, largest, later = f"{name(formats)}, unlike gradients", lambda x: float(x.max()), lambda x: x[
            updates // 2 :].mean(0)
        yield row(case, "largest step", "learning rates", largest(ours), largest(nearest),
                  "rounded to nearest", True)
        yield row(case, "weights that keep up", "of 1", float(np.mean(later(ours) > later(plain) / 2)), 1,
                  "float32")


def adam_steps(adam: optax.GradientTransformation, grads: list[jax.Array]) -> np.ndarray:
    """|step| by update and weight, in learning rates."""
    update, state, steps = rounding_exact_jit(adam.update), adam.init(grads[0]), []
    for g in grads:
        step, state = update(g, state)
        steps.append(np.abs(step))
    return np.array(steps)


def kept_adam(formats: Formats, b2: float = 0.95, to_nearest: bool = False) -> optax.GradientTransformation:
    """optax.scale_by_adam whose moments are encoded and decoded at every update, rounded as in
    jaxfp8rl.optim.adamw or to nearest."""
    adam, read = optax.scale_by_adam(0.9, b2), functools.partial(jax.tree.map, decode, is_leaf=is_scaled)

    def write(x: jax.Array, which: int, count: jax.Array) -> Stored:
        word = random_bits(jnp.stack([jnp.uint32(count)] * 2), 0, x.shape)[which]
        return encode(x, formats[which]) if to_nearest else encode(x, formats[which], word, FAINT[which])

    def init(params: Params) -> optax.ScaleByAdamState:
        moment = lambda kept_as: jax.tree.map(lambda p: zeros(p.shape, kept_as), params)
        return optax.ScaleByAdamState(jnp.int32(0), moment(formats.first), moment(formats.second))

    def update(grads: Params, state: optax.ScaleByAdamState, params: Params | None = None) -> tuple:
        steps, new = adam.update(grads, optax.ScaleByAdamState(state.count, read(state.mu), read(state.nu)))
        mu, nu = (jax.tree.map(lambda x, n=n: write(x, n, new.count), tree)
                  for n, tree in ((1, new.mu), (2, new.nu)))
        return steps, optax.ScaleByAdamState(new.count, mu, nu)

    return optax.GradientTransformation(init, update)


# An update alone
# -------------------------------------------------------------------------------------------------------


def update_rows() -> Iterator[dict]:
    """The time and temporary memory of an update, against optax.adamw in float32 under the same guard."""
    stacks, cfg = layer_stacks(), Optim(lr=1e-6, weight_decay=0.01)
    count = sum(np.prod(s) for s in stacks.values())
    yardstick = from_optax(
        optax.chain(optax.clip_by_global_norm(cfg.clip_norm),
                    optax.adamw(cfg.lr, cfg.b1, cfg.b2, cfg.eps, weight_decay=0.01))
    )
    theirs = timed_update(yardstick, stacks)
    for formats in (FLOAT32, *KEPT):
        ours = timed_update(adamw(cfg, make_schedule(cfg, 1), formats), stacks)
        for metric, unit, a, b in zip(("an update", "its temporaries"),
                                      ("ns a parameter", "bytes a parameter"), ours, theirs):
            yield row(f"{name(formats)}, {LAYERS} layers", metric, unit, a / count, b / count,
                      "optax.adamw, float32", True)


def floor_rows() -> Iterator[dict]:
    """The time of an update against a copy of as many bytes: gradients are read, masters and moments read and
    written."""
    stacks, cfg = layer_stacks(), Optim(lr=1e-6, weight_decay=0.01)
    x, double = jnp.ones(2**28), jax.jit(lambda x: 2 * x)
    copies = [_ns(lambda: double(x)) for _ in range(UPDATES)]
    for formats in (FLOAT32, LEAST):
        ours, temporaries = timed_update(adamw(cfg, make_schedule(cfg, 1), formats), stacks)
        moved = sum(4 * np.prod(s) + 2 * sum(nbytes(s, kept_as) for kept_as in formats[:3])
                    for s in stacks.values())
        case, floor = f"{name(formats)}, {LAYERS} layers of width {stacks['q'][1]}", min(copies) * moved / (
            2 * x.nbytes)
        yield row(case, "an update", "ms", ours / 1e6, floor / 1e6, "a copy of as many bytes", True)
        yield row(case, "its temporaries", "MiB", temporaries / 2**20, moved / 2**20, "all that moves", True)


def layer_stacks() -> dict[str, tuple]:
    d, f = LAYER["gpu" if jax.default_backend() == "gpu" else "cpu"]
    shapes = {"q": (d, d), "k": (d // 4, d), "v": (d // 4, d), "o": (d, d), "gate": (f, d), "up": (f, d),
              "down": (d, f)}
    return {k: (LAYERS, *s) for k, s in shapes.items()}


def _ns(f: Callable) -> int:
    start = time.perf_counter_ns()
    jax.block_until_ready(f())
    return time.perf_counter_ns() - start


def timed_update(optimizer: Optimizer, stacks: dict[str, tuple]) -> tuple[float, int]:
    """(ns, bytes) per parameter."""
    draw = lambda scale: {"layers": {k: scale * jax.random.normal(jax.random.key(0), s)
                                     for k, s in stacks.items()}}
    state, grads = init_state(draw(0.02), optimizer), draw(1e-4)
    update = rounding_exact_jit(
        lambda state, grads: guarded_update(optimizer, state, jnp.float32(0), grads)[0],
                       donate_argnums=0)
    compiled = update.lower(state, grads).compile()
    held = [state]
    del state

    def update_once() -> TrainState:
        held[0] = compiled(held[0], grads)
        return held[0]

    taken = [_ns(update_once) for _ in range(UPDATES)]
    return min(taken), compiled.memory_analysis().temp_size_in_bytes


# Learning
# ------------------------------------------------------------------------------------------------------------


def learning(steps: int, seeds: int) -> Iterator[tuple[list[dict], dict[str, list[float]]]]:
    """Rows for each format, and its loss by step, averaged over the seeds."""
    words = ["--task.options.operands", "2", "--sft.steps", str(steps)]
    cfgs = [load_config("demo", [*words, "--run.seed", str(seed)]) for seed in range(seeds)]
    runs = [(starting_params(cfg, model_config(cfg)), list(examples(cfg))) for cfg in cfgs]
    wanted = None
    for formats, to_nearest in LEARNING:
        step, optimizer = sft_step(cfgs[0], formats, to_nearest)
        losses = np.array([losses_of(step, optimizer, *run) for run in runs])
        ends = losses[:, -max(steps // 10, 1) :].mean(1)
        wanted = ends if wanted is None else wanted
        label = name(formats) + ", rounded to nearest" * to_nearest
        case = f"{label}: {steps} steps of the warm start"
        rows = [
            row(case, f"loss, mean of {seeds} seeds", "nats", float(ends.mean()), float(wanted.mean()),
            "float32", True),
            row(case, "largest difference of a seed", "nats", float(np.abs(ends - wanted).max()),
                float(np.ptp(wanted)), "range of float32's seeds", True),
        ]
        yield rows, {label: [round(float(x), 5) for x in losses.mean(0)]}


def examples(cfg: Config) -> Iterator[TrainBatch]:
    """The packed batches of a warm start."""
    data, shape = load_data(cfg, model_config(cfg)), (cfg.train.row_tokens, cfg.train.rows_per_microbatch)
    microbatches = microbatches_needed(cfg.sft.examples_per_step, cfg.max_model_len, *shape)
    for step in range(1, cfg.sft.steps + 1):
        rng = np.random.default_rng([cfg.run.seed, step])
        samples = []
        for prompt in (data.train[i] for i in rng.integers(len(data.train), size=cfg.sft.examples_per_step)):
            answer = data.tokenizer.encode(data.task.demonstrate(prompt.problem, rng),
                                           add_special_tokens=False)
            completion = [*answer[: cfg.rollout.max_new_tokens - 1], data.tokenizer.eos_token_ids[0]]
            samples.append(Sample(prompt.token_ids, completion, np.zeros(len(completion), np.float32), 0.0))
        yield pack(samples, *shape, microbatches)


def sft_step(cfg: Config, formats: Formats, to_nearest: bool) -> tuple[Callable, Optimizer]:
    """step(state, batch) -> (state, metrics), the update of jaxfp8rl.training.warm_start without FP8, with
    other formats, or with moments rounded to nearest."""
    model = model_config(cfg)
    precision = Precision.uniform(model.num_hidden_layers, cfg.precision.compute_dtype,
                                  weight_dtype=cfg.precision.weight_dtype)
    optim = optim_of(cfg)
    schedule = make_schedule(optim, cfg.sft.steps)
    optimizer = adamw(optim, schedule, formats)
    if to_nearest:
        adam = kept_adam(formats, optim.b2, to_nearest=True)
        optimizer = from_optax(
            optax.chain(optax.clip_by_global_norm(optim.clip_norm), adam,
                        optax.scale_by_learning_rate(schedule))
        )
    policy, update = make_policy(precision), make_sft_step(make_logprobs(model, precision, 1.0, "none"),
                                                           precision, optimizer)

    def step(state: TrainState, batch: TrainBatch) -> tuple[TrainState, StepMetrics]:
        state, _, metrics = update(state, policy(state.params), batch)
        return state, metrics

    return step, optimizer


def losses_of(step: Callable, optimizer: Optimizer, params: Params, batches: list[TrainBatch]) -> list[float]:
    state, losses = init_state(jax.tree.map(jnp.copy, params), optimizer), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    return [float(x) for x in losses]


if __name__ == "__main__":
    main()
