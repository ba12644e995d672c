"""Learner and engine in turn on one GPU: cycles of generate, sleep, wake, publish, and the memory of each
side in each state.

    jaxfp8rl bench sleep_wake [--size 1.7b] [--cycles 20]

The engine drops weights and cache when it sleeps. It wakes in stages: memory of the weights, a publish in
place, memory of the cache. The yardstick of each number is its value after the second cycle, when everything
has been compiled, so that growth is visible.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import torch

from benchmarks.common import SHAPES, arguments, config, row, write
from benchmarks.publish import random_policy
from bridges.api import GenRequest, SamplingParams, WeightSource
from bridges.engines.vllm_engine import FP8, VllmEngine
from bridges.transports.vllm_inplace import VllmInplace
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.publish.wire import LearnerWeights


def main() -> None:
    parser = arguments(__doc__, "sleep_wake")
    parser.add_argument("--size", choices=SHAPES, default="1.7b")
    parser.add_argument("--cycles", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/sleep_wake.py needs an NVIDIA GPU")
    hf = config(args.size)
    small = dict(max_model_len=256, max_num_seqs=4, gpu_memory_utilization=0.15, kv_cache_bytes=2**33)
    with contextlib.closing(VllmEngine(hf, weights=FP8, sleep="drop_weights", **small)) as engine:
        transport = VllmInplace()
        transport.open(engine)
        model = ModelConfig.from_hf(hf)
        runs = fp8_runs(linear_shapes(model), model.num_hidden_layers)
        source = LearnerWeights(model, random_policy(model, coded=True), runs, "bfloat16")
        transport.publish(source, 0)
        seen = [cycle(engine, transport, source, i + 1) for i in range(args.cycles)]
    case = f"Qwen3-{args.size.upper()}, {args.cycles} cycles"
    first, last = seen[1], seen[-1]
    rows = [row(case, what, "GB", last[what], first[what], "after cycle 2, same run", True) for what in first
            if "GB" in what]
    rows += [row(case, what, "ms", statistics.median(c[what] for c in seen[1:]), first[what],
                 "cycle 2, same run", True)
             for what in first if "ms" in what]
    write(args.out, "sleep_wake", rows, args.plot, cycles=seen)
    if len({c["tokens"] for c in seen}) > 1:
        sys.exit("the same weights generated different tokens after a cycle")


def cycle(engine: VllmEngine, transport: VllmInplace, source: WeightSource, version: int) -> dict:
    """One cycle's seconds, the memory in its four states, and the greedy tokens of a prompt."""
    found: dict = {"tokens": tokens(engine), **memory("awake")}
    found["sleep, ms"] = timed(engine.sleep)
    found |= memory("asleep")
    found["wake, ms"] = timed(engine.wake)
    found |= memory("weights awake")
    found["publish, proof and cache awake, ms"] = timed(lambda: transport.publish(source, version))
    return found | memory("published")


def tokens(engine: VllmEngine) -> str:
    done = engine.generate([GenRequest("r", tuple(range(32)), SamplingParams(8, temperature=0.0))])[0][0]
    return " ".join(map(str, done.token_ids))


def memory(when: str) -> dict[str, float]:
    """GB in use by JAX's and torch's allocators, and on the device according to the driver."""
    free, total = torch.cuda.mem_get_info()
    in_use = jax.local_devices()[0].memory_stats()["bytes_in_use"]
    numbers = {"JAX": in_use, "torch": torch.cuda.memory_allocated(), "device": total - free}
    return {f"{what}, {when}, GB": round(n / 1e9, 4) for what, n in numbers.items()}


def timed(f) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 2)


if __name__ == "__main__":
    main()
