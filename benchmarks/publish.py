"""What a publish into vLLM costs on one GPU: Qwen3 shapes, random weights made on the device, CUDA graphs on.

    jaxfp8rl bench publish [--sizes 8b 4b 1.7b 0.6b] [--publishes 20]

Ours is `VllmInplace`: quantise (recipe fp8_rollout alone: under fp8_unified the policy holds the codes), write into the engine's
tensors, prove that every byte arrived. The yardstick, in the same run, is vLLM's own `reload_weights` through `VllmReload`, fed
by the same source, which proves nothing. Times are host seconds around a whole publish, the device waited for; phases are timed
one by one, so that their sum exceeds a publish, in which they overlap, and stand beside the time in which as many bytes as they
have to read and write are read and written by a copy. Extra memory is what the peaks of JAX's and torch's
allocators rise to above what was in use before the first publish.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import torch

from benchmarks.common import SHAPES, arguments, config, row, write
from bridges import manifest
from bridges.api import GenRequest, PublishReceipt, SamplingParams, WeightTransport
from bridges.rollout.vllm_engine import FP8, VllmEngine
from bridges.weights.digest import stack_digests
from bridges.weights.dlpack import torch_view
from bridges.weights.vllm_inplace import PART, VllmInplace
from bridges.weights.vllm_inprocess import VllmReload
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes, param_table
from jaxfp8rl.precision.linear import QuantizedWeight
from jaxfp8rl.precision.recipe import fp8_runs
from jaxfp8rl.publish import LearnerWeights
from jaxfp8rl.types import Params

YARDSTICK, FLOOR = "vLLM's reload_weights, same run", "a copy that moves as many bytes, same run"


def main() -> None:
    parser = arguments(__doc__, "publish")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["8b", "4b", "1.7b", "0.6b"])
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--child", nargs=2, metavar=("SIZE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        size, out = args.child
        Path(out).write_text(json.dumps(bench_size(size, args.publishes)))
        return
    if not torch.cuda.is_available():
        sys.exit("benchmarks/publish.py needs an NVIDIA GPU")
    rows, each = [], {}
    for size in args.sizes:  # in a process of its own: the peak of JAX's memory is a process's
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            subprocess.run([sys.executable, __file__, "--publishes", str(args.publishes), "--child", size, str(out)], check=True)
            found, more = json.loads(out.read_text())
        rows += found
        each |= more
        write(args.out, "publish", rows, args.plot, each=each)


def engine(size: str) -> VllmEngine:
    """Small in everything but its weights, so that it starts soon."""
    return VllmEngine(config(size), weights=FP8, max_model_len=256, max_num_seqs=4, kv_cache_bytes=2**28)


def bench_size(size: str, count: int) -> tuple[list[dict], dict]:
    """Rows, and what they are medians of."""
    case, rows, each = f"Qwen3-{size.upper()}", [], {}
    with contextlib.closing(engine(size)) as e:
        bench_engine(case, e, config(size), count, rows, each, copy_rate())
    return rows, each


def bench_engine(case: str, e: VllmEngine, hf: dict, count: int, rows: list[dict], each: dict, rate: float) -> None:
    model = ModelConfig.from_hf(hf)
    runs = fp8_runs(linear_shapes(model), model.num_hidden_layers)
    plain = random_policy(model)
    sources = {"fp8_rollout": LearnerWeights(model, plain, runs, "bfloat16")}
    ours, yardstick = VllmInplace(), VllmReload()
    ours.open(e)
    yardstick.open(e)
    extra = extra_bytes(lambda: ours.publish(sources["fp8_rollout"], 1))
    coded = in_codes(plain)
    sources["fp8_unified"] = LearnerWeights(model, coded, runs, "bfloat16")
    ours_ms = {recipe: [publish(ours, source) for _ in range(count + 2)][2:] for recipe, source in sources.items()}
    check_it_generates(e)
    phases = time_phases(f"{case}, alone", ours, sources, coded, count, rate)
    each[case] = {"copy GB/s, bytes read and written": round(rate, 1)}
    each[case] |= {f"publish {recipe}, ms": [round(ms, 2) for ms, _ in times] for recipe, times in ours_ms.items()}
    for recipe, times in ours_ms.items():
        receipt = times[0][1]
        reloads = [publish(yardstick, sources[recipe])[0] for _ in range(5)][1:]
        mine, theirs = statistics.median(ms for ms, _ in times), statistics.median(reloads)
        what = "quantise + publish + proof" if recipe == "fp8_rollout" else "publish + proof"
        rows += [
            row(f"{case} {recipe}", what, "ms", mine, theirs, YARDSTICK, True),
            row(f"{case} {recipe}", "rate", "GB/s", receipt.bytes / mine / 1e6, receipt.bytes / theirs / 1e6, YARDSTICK),
        ]
        each[case] |= {"bytes": receipt.bytes, "tensors": receipt.tensors, f"reload {recipe}, ms": reloads}
    more = extra_bytes(lambda: yardstick.publish(sources["fp8_rollout"], 2))
    rows += [row(f"{case} fp8_rollout", "extra memory", "GB", extra / 1e9, more / 1e9, YARDSTICK, True), *phases]


def time_phases(case: str, ours: VllmInplace, sources: dict, coded: Params, count: int, rate: float) -> list[dict]:
    """What a publish consists of, each alone. rate: GB/s of a copy."""
    metas = sources["fp8_unified"].manifest()
    size, layers = manifest.nbytes(metas), jax.tree.leaves(coded["layers"])
    codes = manifest.nbytes(m for m in metas if m.dtype == "float8_e4m3fn")

    def quantise() -> None:
        recent = collections.deque(maxlen=2)  # parts, as many as a publish keeps
        for part in sources["fp8_rollout"].stacks(PART):
            if not part[0].held:
                recent.append(part)
        jax.block_until_ready([rows.stack for part in recent for rows in part])

    def copy() -> None:
        for part in sources["fp8_unified"].stacks(PART):
            for rows in part:
                view = torch_view(rows.stack)
                ours.copy(rows.names, view[None] if rows.first is None else view[rows.first :][: len(rows.names)])
        torch.cuda.synchronize()

    def digest_source() -> None:
        jax.block_until_ready([stack_digests(leaf) for leaf in layers])

    parts = {  # and the bytes that it reads and writes, of what it makes scales left out
        "quantise": (quantise, 3 * codes), "copy": (copy, 2 * size),
        "digest of the source's layers": (digest_source, sum(leaf.nbytes for leaf in layers)),
        "digest of the engine": (ours.read_digests, size),
    }  # fmt: skip
    ms = {name: statistics.median([timed(f) for _ in range(count + 2)][2:]) for name, (f, _) in parts.items()}
    return [row(case, name, "ms", ms[name], moved / rate / 1e6, FLOOR, True) for name, (_, moved) in parts.items()]


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
    """How far `f` raises the peaks of both allocators above what is in use. JAX's peak cannot be reset: it counts in full."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    device, torch_before = jax.local_devices()[0], torch.cuda.memory_allocated()
    before = device.memory_stats()["bytes_in_use"]
    f()
    torch.cuda.synchronize()
    return device.memory_stats()["peak_bytes_in_use"] - before + torch.cuda.max_memory_allocated() - torch_before


def check_it_generates(e: VllmEngine) -> None:
    done = e.generate([GenRequest("r", tuple(range(32)), SamplingParams(8))])[0][0]
    if problem := done.problem():
        raise SystemExit(f"the engine is broken after the publishes: {problem}")


def random_policy(model: ModelConfig) -> Params:
    """A policy in bfloat16, one stack of layers, made a layer at a time so that its making leaves no peak behind."""
    policy: Params = {"layers": ({},)}
    for i, (path, entry) in enumerate({e.path: e for e in param_table(model)}.items()):
        stacked = entry.layer is not None
        shape = (model.num_hidden_layers, *entry.shape) if stacked else entry.shape
        leaf = jnp.ones(shape, jnp.bfloat16) if entry.role == "norm" else normal(jax.random.key(i), shape)
        node = policy["layers"][0] if stacked else policy
        *nodes, last = path[1:] if stacked else path
        functools.reduce(lambda n, key: n.setdefault(key, {}), nodes, node)[last] = leaf
    return jax.block_until_ready(policy)


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    chunk = (shape[0], *shape[1:]) if len(shape) == 3 else (shape[0] // 128, 128, shape[1])
    keys = jax.random.split(key, chunk[0])
    return jax.lax.map(lambda k: 0.02 * jax.random.normal(k, chunk[1:], jnp.bfloat16), keys).reshape(shape)


def in_codes(policy: Params) -> Params:
    """The same policy as recipe fp8_unified holds it."""
    of = jax.jit(QuantizedWeight.of)

    def leaf(path: tuple, w: jax.Array) -> jax.Array | QuantizedWeight:
        return of(w) if path[-2].key.endswith("_proj") else w

    return {**policy, "layers": (jax.tree_util.tree_map_with_path(leaf, policy["layers"][0]),)}


def copy_rate() -> float:
    """GB/s of torch's copy of 4 GiB, read and written."""
    a = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)

    def copy() -> None:
        b.copy_(a)
        torch.cuda.synchronize()

    return 2 * a.nbytes / statistics.median(timed(copy) for _ in range(12)) / 1e6


if __name__ == "__main__":
    main()
