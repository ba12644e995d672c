"""Adapters over an FP8 base beside all parameters, on one GPU: scoring, update, peak memory, a merged
publish's sums, and publishes into vLLM.

    jaxfp8rl bench lora [--size 8b] [--rank 32] [--layers 8] [--learners adapters everything slots]

Qwen3 shapes and random weights. "adapters": rank 32 on all linears over the published FP8 codes, with masters
and moments in float32. "everything": all parameters in FP8 (`fp8_unified`), with the states of `jaxfp8rl
bench step --optim offload`, without which 8B does not fit an H100; it is the yardstick. Each has a process of
its own, and the functions of a run: `make_score`, `make_train_step`. "merge": all weights with the adapters
merged in are made in the published format, in parts as a publish makes them, and dropped; the copy into an
engine is not in it. "left" is `lora/merge_error` of the last update.

"slots" is vLLM in this process with room for adapters. "publish": adapters alone into its slots, proven; the
first publish, "with base", brings the base, too. "proof": reading base and slots again, as after each publish
of a run. "decode" is the seconds of 32 sequences of 128 tokens, "decode, plain" those of an engine without
slots.

Needs a Hopper GPU; vLLM for slots.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import SHAPES, arguments, clocked, config, row, write
from benchmarks.processes import answered, found_by
from benchmarks.step import OPTIMIZERS, batch_of, precision_of, rows_of, timed
from bridges.api import GenRequest, RolloutEngine, SamplingParams
from bridges.inside_vllm.adapters import AdapterSlots
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.config.lora import ATTENTION, MLP
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.policy.adapters import adapter_product, adapter_shapes, init_adapters
from jaxfp8rl.policy.initial import fresh_state
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.precision.adapters import merged_policy
from jaxfp8rl.precision.records import AdapterProduct
from jaxfp8rl.publish.adapters import AdaptedWeights, Adapters, AdapterWeights, merge_error
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from jaxfp8rl.types import Params

EVERYTHING, ADAPTERS, SLOTS = "everything", "adapters", "slots"
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
    parser.add_argument("--learners", nargs="+", choices=[EVERYTHING, ADAPTERS, SLOTS],
                        default=[EVERYTHING, ADAPTERS])
    parser.add_argument("--child", nargs=2, metavar=("LEARNER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.data = args.fsdp = 1
    if answered(args.child, lambda learner: slots(args) if learner == SLOTS else measure(learner, args)):
        return
    each = {learner: found_by(__file__, learner) for learner in args.learners}
    first, layers = args.learners[0], args.layers or SHAPES[args.size][2]
    case = f"Qwen3-{args.size.upper()}, {layers} layers, {args.microbatches} x {args.row_tokens} tokens"
    rows = [row(f"{case}, {learner}", what, unit, found[what], each[first].get(what, found[what]), first,
                True)
            for learner, found in each.items()
            for what, unit in (("score", "ms"), ("update", "ms"), ("peak memory", "GB"), ("merge", "ms"),
                              ("publish", "ms"), ("with base", "ms"), ("proof", "ms"), ("decode", "s"),
                               ("decode, plain", "s"))
            if what in found]
    write(args.out, "lora", rows, args.plot, each=each, settings={"rank": args.rank, "remat": args.remat})


def measure(learner: str, args: argparse.Namespace) -> dict:
    """Median ms of scoring, of an update and of making a merged publish; GB at the peak; the losses."""
    model = ModelConfig.from_hf(config(args.size, args.layers))
    cfg = load_config("demo", ["--sft.steps", "0", "--lora.rank", str(args.rank), "--run.dir", "unused"])
    product = adapter_product(cfg) if learner == ADAPTERS else None
    precision = dataclasses.replace(precision_of(model, "fp8_unified"), adapters=product)
    optimizer = make_optimizer(Optim(lr=1e-5, **({} if product else OPTIMIZERS["offload"])), 100)
    logprobs, quantize = make_logprobs(model, precision, 1.0, args.remat), make_policy(precision)
    score, train = make_score(logprobs), make_train_step(logprobs, precision, Loss(), Correction().resolve(),
                                                         optimizer)
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
    return {"merge": 1e3 * statistics.median(seconds[1:]),
            "left": merge_error(policy, product, runs, "bfloat16")}


def slots(args: argparse.Namespace) -> dict:
    """Median ms of publishes into vLLM's slots, and seconds of decoding with slots and without."""
    hf = config(args.size, args.layers)
    model = ModelConfig.from_hf(hf)
    room, limits = AdapterSlots(1, args.rank, ATTENTION + MLP), dict(max_model_len=1024, max_num_seqs=32)
    return {k: v for adapters in (room, None) for k, v in in_vllm(hf, model, adapters, args, limits).items()}


def in_vllm(hf: dict, model: ModelConfig, adapters: AdapterSlots | None, args: argparse.Namespace,
            limits: dict[str, Any]) -> dict[str, float]:
    """Of an engine with slots, or of one without."""
    from bridges.engines.vllm_engine import FP8, VllmEngine
    from bridges.transports.vllm_inplace import VllmInplace
    from bridges.transports.vllm_slots import VllmSlots

    with contextlib.closing(VllmEngine(hf, weights=FP8, kv_cache_bytes=2**31, adapters=adapters,
                                       **limits)) as engine:
        transport = VllmSlots(VllmInplace()) if adapters else VllmInplace()
        transport.open(engine)
        source = adapted_source(model, args, adapters is not None)
        if not adapters:
            transport.publish(source(0), 0)
            return {"decode, plain": decode(engine)}
        receipts = [transport.publish(source(i), i) for i in range(args.rounds + 2)]
        proof = [clocked(lambda: transport.verify(receipts[-1])) for _ in range(args.rounds)]
        return {"with base": 1e3 * receipts[0].seconds, "bytes": receipts[-1].bytes,
                "publish": 1e3 * statistics.median(r.seconds for r in receipts[2:]),
                "proof": 1e3 * statistics.median(proof), "decode": decode(engine)}


def adapted_source(model: ModelConfig, args: argparse.Namespace, with_adapters: bool) -> Callable[[int], Any]:
    """i -> the source of a policy: the same base, and adapters of their own."""
    cfg = load_config("demo", ["--sft.steps", "0", "--lora.rank", str(args.rank), "--run.dir", "unused"])
    product = adapter_product(cfg)
    assert product is not None
    precision = dataclasses.replace(precision_of(model, "fp8_unified"), adapters=product)
    quantize = make_policy(precision)
    weights = jax.jit(lambda key: init_params(model, key, jnp.bfloat16))(jax.random.key(0))
    base = jax.block_until_ready(quantize(weights))
    del weights
    plain = LearnerWeights(model, base, precision.runs, "bfloat16")
    if not with_adapters:
        return lambda i: plain
    shape = Adapters(tuple(adapter_shapes(cfg, model).items()), model.num_hidden_layers, args.rank, product)

    def source(i: int) -> AdaptedWeights:
        own = quantize(jax.tree.map(lambda x: x + 1e-3 * i, init_adapters(cfg, model)))
        return AdaptedWeights(plain, AdapterWeights(jax.block_until_ready(over_base(own, base)), shape), base)

    return source


def decode(engine: RolloutEngine) -> float:
    """Median seconds of 32 completions of 128 tokens."""
    ask = lambda: engine.generate([GenRequest("a", tuple(range(64)), SamplingParams(128), 32)])
    ask()
    return statistics.median(clocked(ask) for _ in range(3))


if __name__ == "__main__":
    main()
