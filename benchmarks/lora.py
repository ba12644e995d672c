"""Adapters over an FP8 base beside all parameters, on one GPU: scoring, update, peak memory, and a merged
publish's sums.

    jaxfp8rl bench lora [--size 8b] [--rank 32] [--layers 8] [--learners adapters everything]

Qwen3 shapes and random weights. "adapters": rank 32 on all linears over the published FP8 codes, with masters
and moments in float32. "everything": all parameters in FP8 (`fp8_unified`), with the states of `jaxfp8rl
bench step --optim offload`, without which 8B does not fit an H100; it is the yardstick. Each has a process of
its own, and the functions of a run: `make_score`, `make_train_step`. "merge": all weights with the adapters
merged in are made in the published format, in parts as a publish makes them, and dropped; the copy into an
engine is not in it. "left" is `lora/merge_error` of the last update.

Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import SHAPES, arguments, config, row, write
from benchmarks.step import OPTIMIZERS, batch_of, precision_of, rows_of, timed
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.policy.adapters import adapter_product, init_adapters
from jaxfp8rl.policy.initial import fresh_state
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.precision.adapters import merged_policy
from jaxfp8rl.precision.records import AdapterProduct
from jaxfp8rl.publish.adapters import merge_error
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from jaxfp8rl.types import Params

EVERYTHING, ADAPTERS = "everything", "adapters"
PART = 512 * 2**20  # bytes, as a publish makes them


def main() -> None:
    parser = arguments(__doc__, "lora")
    parser.add_argument("--size", choices=list(SHAPES), default="8b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--remat", default="layer")
    parser.add_argument("--learners", nargs="+", choices=[EVERYTHING, ADAPTERS], default=[EVERYTHING, ADAPTERS])
    parser.add_argument("--child", nargs=2, metavar=("LEARNER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.data = args.fsdp = 1
    if args.child:
        learner, out = args.child
        Path(out).write_text(json.dumps(measure(learner, args)))
        return
    each = {learner: child(learner) for learner in args.learners}
    first, layers = args.learners[0], args.layers or SHAPES[args.size][2]
    case = f"Qwen3-{args.size.upper()}, {layers} layers, {args.microbatches} x {args.row_tokens} tokens"
    rows = [row(f"{case}, {learner}", what, unit, found[what], each[first].get(what, found[what]), first, True)
            for learner, found in each.items()
            for what, unit in (("score", "ms"), ("update", "ms"), ("peak memory", "GB"), ("merge", "ms"))
            if what in found]
    write(args.out, "lora", rows, args.plot, each=each, settings={"rank": args.rank, "remat": args.remat})


def child(learner: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", learner, str(out)], check=True)
        return json.loads(out.read_text())


def measure(learner: str, args: argparse.Namespace) -> dict:
    """Median ms of scoring, of an update and of making a merged publish; GB at the peak; the losses."""
    model = ModelConfig.from_hf(config(args.size, args.layers))
    cfg = load_config("demo", ["--sft.steps", "0", "--lora.rank", str(args.rank), "--run.dir", "unused"])
    product = adapter_product(cfg) if learner == ADAPTERS else None
    precision = dataclasses.replace(precision_of(model, "fp8_unified"), adapters=product)
    optimizer = make_optimizer(Optim(lr=1e-5, **({} if product else OPTIMIZERS["offload"])), 100)
    logprobs, quantize = make_logprobs(model, precision, 1.0, args.remat), make_policy(precision)
    score, train = make_score(logprobs), make_train_step(logprobs, precision, Loss(), Correction().resolve(), optimizer)
    weights = jax.jit(lambda key: init_params(model, key, jnp.bfloat16))(jax.random.key(0))
    if product:
        state, base = fresh_state(init_adapters(cfg, model), optimizer, "bfloat16", ONE), quantize(weights)
        policy = over_base(quantize(state.params), jax.block_until_ready(base))
    else:
        state = fresh_state(weights, optimizer, "bfloat16", ONE)
        policy = quantize(state.params)
    del weights
    batch = batch_of(rows_of(args, model), args)
    found, state, policy = timed(score, train, state, policy, batch, args.rounds)
    return found | (merging(model, policy, precision.runs, product, args.rounds) if product else {})


def merging(model: ModelConfig, policy: Params, runs: tuple, product: AdapterProduct, rounds: int) -> dict:
    """Median ms of making every merged tensor, and what their rounding loses."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for part in LearnerWeights(model, merged_policy(policy, product), runs, "bfloat16").stacks(PART):
            jax.block_until_ready([rows.stack for rows in part])
        seconds.append(time.perf_counter() - start)
    return {"merge": 1e3 * statistics.median(seconds[1:]), "left": merge_error(policy, product, runs, "bfloat16")}


if __name__ == "__main__":
    main()
