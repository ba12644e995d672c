"""The cost of a publish into vLLM on one GPU: Qwen3 shapes, random weights made on the device, CUDA graphs
on.

    jaxfp8rl bench publish [--sizes 8b 4b 1.7b 0.6b] [--publishes 20]
    jaxfp8rl bench publish --sizes 8b 30b-a3b --reloads 1       # a mixture against the dense sizes before it

Ours is `VllmInplace`: quantise (only under recipe fp8_rollout; under fp8_unified the policy holds the codes),
write into the engine's tensors, and prove that every byte arrived. The yardstick, in the same run, is vLLM's
own `reload_weights` through `VllmReload`, fed by the same source, which proves nothing. Times are host
seconds around a whole synchronous publish. Phases are timed one by one, so their sum exceeds a publish, in
which they overlap. Each phase is compared with a copy that reads and writes as many bytes. Extra memory is
the rise of the peaks of JAX's and torch's allocators above the memory in use before the first publish.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import torch

from benchmarks.common import MIXTURES, SHAPES, arguments, config, row, write
from benchmarks.processes import answered, found_by
from bridges.api import GenRequest, ParamMeta, PublishReceipt, Rows, SamplingParams, StackRow, WeightTransport
from bridges.engines.vllm_engine import FP8, VllmEngine
from bridges.proof import manifest
from bridges.proof.digest import by_rows, stack_digests
from bridges.sources.dlpack import torch_view
from bridges.sources.sent import PART
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_reload import VllmReload
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes, param_table
from jaxfp8rl.precision.layer_runs import LayerRun, fp8_runs
from jaxfp8rl.precision.weights import QuantizedWeight
from jaxfp8rl.publish.wire import SCALE_SUFFIX, LearnerWeights, high_precision_modules, is_fp8, wire_manifest
from jaxfp8rl.types import Params

RECIPES = ("fp8_rollout", "fp8_unified")
YARDSTICK, FLOOR = "vLLM's reload_weights, same run", "a copy that moves as many bytes, same run"


def main() -> None:
    parser = arguments(__doc__, "publish")
    parser.add_argument("--sizes", nargs="+", choices=[*SHAPES, *MIXTURES],
                        default=["8b", "4b", "1.7b", "0.6b"])
    parser.add_argument("--layers", type=int, default=0, help="of a mixture; default: all")
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--reloads", type=int, default=4, help="of the yardstick, of each recipe")
    parser.add_argument("--child", nargs=2, metavar=("SIZE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if answered(args.child, lambda size: bench_size(size, args)):
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/publish.py needs an NVIDIA GPU")
    rows, each = [], {}
    for size in args.sizes:  # each in its own process, because JAX's peak memory is per process
        found, more = found_by(__file__, size)
        dense, each = each, each | more
        rows += found + (beside_dense(more, dense) if size in MIXTURES else [])
        write(args.out, "publish", rows, args.plot, each=each)


def fp8_runs_of(model: ModelConfig) -> tuple[LayerRun, ...]:
    """Layer runs with every linear in FP8."""
    return fp8_runs(linear_shapes(model), model.num_hidden_layers, sparse_layers=model.sparse_layers)


def engine(hf: dict) -> VllmEngine:
    """An engine that is small in everything but its weights, so that it starts quickly."""
    model = ModelConfig.from_hf(hf)
    plain = high_precision_modules(model, fp8_runs_of(model))
    limits = dict(max_model_len=256, max_num_seqs=4, kv_cache_bytes=2**28)
    return VllmEngine(hf, weights=FP8, high_precision_modules=plain, **limits)


def bench_size(size: str, args: argparse.Namespace) -> tuple[list[dict], dict]:
    """Rows, and the samples that they are medians of."""
    layers = args.layers if size in MIXTURES else 0
    case, hf = f"Qwen3-{size.upper()}" + (f", {layers} layers" if layers else ""), config(size, layers)
    with contextlib.closing(engine(hf)) as e:
        return bench_engine(case, e, ModelConfig.from_hf(hf), args.publishes, args.reloads, copy_rate())


def bench_engine(
    case: str, e: VllmEngine, model: ModelConfig, count: int, reloads: int, rate: float
) -> tuple[list[dict], dict]:
    """The benchmark of one engine. Only one policy exists at a time: a mixture's takes two fifths of an H200
    in BF16."""
    ours, yardstick = VllmInplace(), VllmReload()
    ours.open(e)
    yardstick.open(e)
    mine, theirs, extra, phases = {}, {}, {}, []

    def policy_of(recipe: str) -> tuple[Params, LearnerWeights]:
        policy = random_policy(model, coded=recipe == "fp8_unified")
        return policy, LearnerWeights(model, policy, fp8_runs_of(model), "bfloat16")

    def bench_ours(recipe: str) -> None:
        policy, source = policy_of(recipe)
        extra[recipe] = [extra_bytes(lambda: ours.publish(source, 1))]
        mine[recipe] = [publish(ours, source) for _ in range(count + 2)][2:]
        phases.extend(time_phases(f"{case}, alone", ours, source, policy, count, rate))

    def bench_yardstick(recipe: str) -> None:
        _, source = policy_of(recipe)
        extra[recipe].append(extra_bytes(lambda: yardstick.publish(source, 2)))
        theirs[recipe] = [publish(yardstick, source)[0] for _ in range(reloads)]

    for recipe in RECIPES:
        bench_ours(recipe)
    check_it_generates(e)
    if len({receipt.content for times in mine.values() for _, receipt in times}) > 1:
        raise SystemExit("both recipes publish the same weights, and the engine got different bytes")
    for recipe in RECIPES:
        bench_yardstick(recipe)
    receipt = mine["fp8_rollout"][0][1]
    found = {"copy GB/s, bytes read and written": round(rate, 1), "bytes": receipt.bytes,
             "tensors": receipt.tensors}
    rows = []
    for recipe, times in mine.items():
        found[f"publish {recipe}, ms"] = [round(ms, 2) for ms, _ in times]
        found[f"reload {recipe}, ms"] = theirs[recipe]
        ms, reload = statistics.median(ms for ms, _ in times), statistics.median(theirs[recipe])
        what = "quantise + publish + proof" if recipe == "fp8_rollout" else "publish + proof"
        rows += [
            row(f"{case} {recipe}", what, "ms", ms, reload, YARDSTICK, True),
            row(f"{case} {recipe}", "rate", "GB/s", receipt.bytes / ms / 1e6, receipt.bytes / reload / 1e6,
                YARDSTICK),
        ]
    memory = row(f"{case} fp8_rollout", "extra memory", "GB", *(x / 1e9 for x in extra["fp8_rollout"]),
                 YARDSTICK, True)
    return [*rows, memory, *phases], {case: found}


def beside_dense(mixture: dict, dense: dict) -> list[dict]:
    """A mixture's rate of publishes in place, against those of the sizes before it."""
    rate = lambda found, recipe: found["bytes"] / statistics.median(found[f"publish {recipe}, ms"]) / 1e6
    return [row(f"{case} {recipe}", "rate", "GB/s", rate(found, recipe), rate(other, recipe),
                f"{name}'s in place, same run")
            for case, found in mixture.items() for recipe in RECIPES for name, other in dense.items()]


def time_phases(case: str, ours: VllmInplace, source: LearnerWeights, policy: Params, count: int,
                rate: float) -> list[dict]:
    """The phases of a publish, each timed alone: quantising for a BF16 policy, all others for one with codes.
    rate: GB/s of a copy."""
    metas, layers = source.manifest(), jax.tree.leaves(policy["layers"])
    size, coded = manifest.nbytes(metas), any(leaf.dtype == jnp.float8_e4m3fn for leaf in layers)
    codes = manifest.nbytes(m for m in metas if m.dtype == "float8_e4m3fn")

    def quantise() -> None:
        last = jnp.zeros(())
        for part in source.stacks(PART):
            if not part[0].held:
                last = part[-1].stack  # the scales of the quantised weights
            part.clear()
        last.block_until_ready()

    def copy() -> None:
        for part in source.stacks(PART):
            for rows in part:
                view = torch_view(rows.stack)
                ours.copy(rows.names, view[None] if rows.first is None
                          else by_rows(view)[rows.first :][: len(rows.names)])
        torch.cuda.synchronize()

    def digest_source() -> None:
        jax.block_until_ready([stack_digests(leaf) for leaf in layers])

    parts = {  # phase -> its runs and the bytes that it reads and writes, without the scales that it makes
        "copy": (copy, 2 * size),
        "digest of the source's layers": (digest_source, sum(leaf.nbytes for leaf in layers)),
        "digest of the engine": (ours.read_digests, size),
    } if coded else {"quantise": (quantise, 3 * codes)}
    ms = {name: statistics.median([timed(f) for _ in range(count + 2)][2:]) for name, (f, _) in parts.items()}
    return [row(case, name, "ms", ms[name], moved / rate / 1e6, FLOOR, True)
            for name, (_, moved) in parts.items()]


def timed(f: Callable) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    return (time.perf_counter() - start) * 1e3


def publish(transport: WeightTransport, source: LearnerWeights) -> tuple[float, PublishReceipt]:
    """(ms, receipt)."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    receipt = transport.publish(source, 1)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, receipt


def extra_bytes(f: Callable) -> int:
    """The rise of both allocators' peaks above the memory in use while `f` runs. JAX's peak cannot be reset
    and counts in full."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # JAX may need it
    torch.cuda.reset_peak_memory_stats()
    device, torch_before = jax.local_devices()[0], torch.cuda.memory_allocated()
    before = device.memory_stats()["bytes_in_use"]
    f()
    torch.cuda.synchronize()
    return device.memory_stats()["peak_bytes_in_use"] - before + torch.cuda.max_memory_allocated(
        ) - torch_before


def check_it_generates(e: VllmEngine) -> None:
    done = e.generate([GenRequest("r", tuple(range(32)), SamplingParams(8))])[0][0]
    if problem := done.problem():
        raise SystemExit(f"the engine is broken after the publishes: {problem}")


def random_policy(model: ModelConfig, coded: bool = False) -> Params:
    """A policy in bfloat16, or, with `coded`, the same weights as recipe fp8_unified holds them. One stack of
    layers, made one matrix at a time so that the construction leaves no peak."""
    policy: Params = {"layers": ({},)}
    # the last of each stack
    for i, (path, entry) in enumerate({e.path: e for e in param_table(model)}.items()):
        leaf = drawn(i, (*(n + 1 for n in entry.index), *entry.shape), entry.role.kind)
        node = policy["layers"][0] if entry.index else policy
        *nodes, last = path[1:] if entry.index else path
        functools.reduce(lambda n, key: n.setdefault(key, {}), nodes, node)[last] = (
            quantised(leaf) if coded and entry.role.kind == "linear" else leaf
        )
        del leaf
    return jax.block_until_ready(policy)


def drawn(seed: int, shape: tuple[int, ...], kind: str) -> jax.Array:
    return jnp.ones(shape, jnp.bfloat16) if kind == "norm" else normal(jax.random.key(seed), shape)


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    *lead, n, k = shape if len(shape) > 2 else (shape[0] // 128, 128, shape[1])
    keys = jax.random.split(key, math.prod(lead))
    return jax.lax.map(lambda key: 0.02 * jax.random.normal(key, (n, k), jnp.bfloat16), keys).reshape(shape)


quantised = jax.jit(QuantizedWeight.of)


class RandomWeights:
    """StackSource of weights like those of `random_policy`. Each part is made on demand and not kept, for an
    engine that leaves no room for a policy. A tensor has the same format in all layers."""

    def __init__(self, model: ModelConfig, runs: tuple[LayerRun, ...]):
        self.model, self._runs = model, runs

    def manifest(self) -> tuple[ParamMeta, ...]:
        return wire_manifest(self.model, self._runs, "bfloat16")

    def __iter__(self) -> Iterator[tuple[str, StackRow | jax.Array]]:
        """All tensors, in the manifest's order."""
        made = (rows for part in self.stacks(PART) for rows in part)
        of = {name: rows.stack if rows.first is None else StackRow(rows.stack, i)
              for rows in made for i, name in enumerate(rows.names)}
        return ((meta.name, of[meta.name]) for meta in self.manifest())

    def stacks(self, nbytes: int) -> Iterator[list[Rows]]:
        seeds, by_path = itertools.count(), collections.defaultdict(list)
        for e in param_table(self.model):
            by_path[e.path].append(e)
        for e, *others in by_path.values():
            names, fp8 = (e.hf_name, *(o.hf_name for o in others)), is_fp8(e, self._runs)
            if not e.index:
                yield [Rows(names, drawn(next(seeds), e.shape, e.role.kind), None, False)]
                continue
            each = self.model.experts.num_experts if len(e.index) > 1 else 1  # tensors of a layer
            fits = each * max(nbytes // (each * math.prod(e.shape) * (1 if fp8 else 2)), 1)
            for some in itertools.batched(names, fits):
                made = drawn(next(seeds), (len(some), *e.shape), e.role.kind)
                stacks = quantised(made) if fp8 else (made,)
                yield [Rows(of, stack, 0, False)
                       for of, stack in zip((some, tuple(n + SCALE_SUFFIX for n in some)), stacks)]
                del made, stacks


def copy_rate() -> float:
    """GB/s of torch's copy of 4 GiB, reads and writes together."""
    a = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)

    def copy() -> None:
        b.copy_(a)
        torch.cuda.synchronize()

    return 2 * a.nbytes / statistics.median(timed(copy) for _ in range(12)) / 1e6


if __name__ == "__main__":
    main()
