"""The learner's part of a step, scoring and update, by recipe, on one GPU: Qwen3 shapes, random weights,
packed rows.

    jaxfp8rl bench step [--sizes 0.6b 1.7b 8b] [--recipes bf16 fp8_unified] [--layers 8] [--fsdp 2]
    jaxfp8rl bench step --sizes 30b-a3b --layers 10 --optim low     # a mixture, with as many layers as fit

The functions are those of a run: `make_score`, `make_train_step`, on M micro-batches of one row of packed
sequences with log-normal lengths, of which the first tenth is the prompt. Every recipe has its own process
and therefore its own peak memory; the yardstick is the first recipe named. MFU: the operations that the model
needs, without recomputation (`jaxfp8rl.memory.flops`), over BF16's peak, if that is known. --layers: fewer
than the model has, if it would not fit. --optim: formats of masters and moments. --remat: train.remat.
--data, --fsdp, --tensor: devices along the axes of the mesh; along the first two, each device has a row of a
micro-batch. A large model needs more than JAX's usual share of the memory:
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.

Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

from benchmarks.attention import packed
from benchmarks.common import MIXTURES, SHAPES, arguments, config, row, write
from benchmarks.processes import answered, found_by
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.distributed.mesh import AXES, make_mesh_layout
from jaxfp8rl.memory.flops import mfu, update_flops
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import Remat
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.precision.layer_runs import fp8_runs, plain_runs
from jaxfp8rl.precision.records import EngineRounding, Precision
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from jaxfp8rl.types import TrainBatch, TrainState

OPTIMIZERS = {"float32": {},
              "low": {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"}}
OPTIMIZERS["offload"] = OPTIMIZERS["low"] | {"offload": True}
PROMPT = 0.1


def main() -> None:
    parser = arguments(__doc__, "step")
    parser.add_argument("--sizes", nargs="+", choices=[*SHAPES, *MIXTURES], default=["0.6b", "1.7b"])
    parser.add_argument("--recipes", nargs="+", choices=["bf16", "fp8_unified"],
                        default=["bf16", "fp8_unified"])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--wgrad-inputs", choices=["1x128", "128x128"], default="1x128",
                        help="of fp8_unified; default: %(default)s")
    parser.add_argument("--optim", choices=OPTIMIZERS, default="float32")
    parser.add_argument("--remat", choices=get_args(Remat), default="mlp")
    parser.add_argument("--trace", type=Path, metavar="FOLDER",
                        help="trace one more update of each recipe with JAX's profiler")
    parser.add_argument("--child", nargs=3, metavar=("SIZE", "RECIPE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if answered(args.child, lambda size, recipe: measure(size, recipe, args)):
        return
    rows, each = [], {}
    for size in args.sizes:
        found = {recipe: found_by(__file__, size, recipe) for recipe in args.recipes}
        first, layers = args.recipes[0], args.layers or (SHAPES | MIXTURES)[size][2]
        shape = f"{args.microbatches} x {args.data * args.fsdp} x {args.row_tokens}"
        case = f"Qwen3-{size.upper()}, {layers} layers, {shape} tokens"
        each[case] = found
        for recipe, f in found.items():
            rows += [row(f"{case}, {recipe}", what, unit, f[what], found[first][what], first, smaller)
                     for what, unit, smaller in (("score", "ms", True), ("update", "ms", True),
                                                 ("peak memory", "GB", True),
                                                 ("MFU", "of BF16's peak", False)) if f[what] is not None]
        settings = {"remat": args.remat, "optim": OPTIMIZERS[args.optim], "wgrad_inputs": args.wgrad_inputs}
        write(args.out, "step", rows, args.plot, each=each, settings=settings)


def measure(size: str, recipe: str, args: argparse.Namespace) -> dict[str, float]:
    """Median ms of scoring and of an update, GB at the peak, MFU of the update, and seconds of
    compilation."""
    model = ModelConfig.from_hf(config(size, args.layers))
    precision = dataclasses.replace(precision_of(model, recipe), wgrad_inputs=args.wgrad_inputs)
    optimizer = make_optimizer(Optim(lr=1e-6, **OPTIMIZERS[args.optim]), 100)
    layout, devices = make_mesh_layout(args.data, args.fsdp, args.tensor), args.data * args.fsdp * args.tensor
    logprobs = make_logprobs(model, precision, 1.0, args.remat, layout)
    score = make_score(logprobs, layout)
    train = make_train_step(logprobs, precision, Loss(), Correction().resolve(), optimizer, layout)
    state = layout.place(jax.jit(lambda key: layout.keep(init_state(init_params(model, key), optimizer,
                                                                    "bfloat16")))(jax.random.key(0)))
    rows = rows_of(args, model)
    policy, batch = make_policy(precision, layout=layout)(state.params), batch_of(rows, args)
    seen, state, policy = timed(score, train, state, policy, batch, args.rounds)
    if args.trace:
        old = jax.block_until_ready(score(policy, batch))
        with jax.profiler.trace(args.trace / f"{size}-{recipe}"):
            jax.block_until_ready(train(state, policy, batch, old)[:2])
    return seen | {"MFU": mfu(update_flops(model, sum(rows, [])), seen["update"] / 1e3, devices)}


def timed(score: Callable, train: Callable, state: TrainState, policy: Any, batch: TrainBatch,
          rounds: int) -> tuple[dict[str, Any], TrainState, Any]:
    """(median ms of scoring and of an update after the first, GB at the peak, the first seconds, losses and
    clipped fractions; the state and the policy after them). Ends the process if a loss is not finite."""
    times: dict[str, list[float]] = {"score": [], "update": []}
    losses, clipped = [], []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        old = jax.block_until_ready(score(policy, batch))
        scored = time.perf_counter()
        state, policy, metrics = train(state, policy, batch, old)
        jax.block_until_ready((state, policy))
        times["score"].append(scored - start)
        times["update"].append(time.perf_counter() - scored)
        losses.append(float(metrics["loss"]))
        clipped.append(float(metrics["clip/fraction"]))
    if not np.isfinite(losses).all():
        raise SystemExit(f"the loss is not finite: {losses}")
    ms = {name: 1e3 * statistics.median(seconds[1:]) for name, seconds in times.items()}
    peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
    return ms | {"peak memory": peak / 1e9, "first score, s": times["score"][0],
                 "first update, s": times["update"][0], "losses": losses, "clipped": clipped}, state, policy


def precision_of(model: ModelConfig, recipe: str) -> Precision:
    """The precision of a run with compiled vLLM: attention, FP8 products and those of experts by the
    kernels."""
    plain = Precision(plain_runs(model.sparse_layers), products="pallas", attention="pallas")
    if recipe == "bf16":
        return plain
    runs = fp8_runs(linear_shapes(model), model.num_hidden_layers, sparse_layers=model.sparse_layers)
    compiled = EngineRounding(fused=True, fused_quantizer=True)
    return dataclasses.replace(plain, runs=runs, gradients="e4m3", rounding=compiled)


def rows_of(args: argparse.Namespace, model: ModelConfig) -> list[list[Sample]]:
    """The samples of each row of all micro-batches."""
    rng = np.random.default_rng(0)

    def sample(n: int) -> Sample:
        tokens, prompt = rng.integers(0, model.vocab_size, n), max(1, int(PROMPT * n))
        return Sample(tokens[:prompt], tokens[prompt:], rng.normal(-12, 0.1, n - prompt), rng.normal())

    lengths = packed(args.row_tokens, args.segments).lengths
    return [[sample(n) for n in lengths] for _ in range(args.microbatches * args.data * args.fsdp)]


def batch_of(rows: list[list[Sample]], args: argparse.Namespace) -> TrainBatch:
    packed_rows = [pack(samples, args.row_tokens, 1, 1) for samples in rows]
    return jax.tree.map(lambda *xs: np.stack(xs).reshape(args.microbatches, -1, args.row_tokens),
                        *packed_rows)


if __name__ == "__main__":
    main()
