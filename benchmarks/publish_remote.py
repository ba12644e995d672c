"""The cost of a publish to vLLM in another process: Qwen3 shapes, random weights made on the device.

    jaxfp8rl bench publish_remote --links cuda_ipc file [--sizes 8b 0.6b] [--publishes 20]
    jaxfp8rl bench publish_remote --links nccl --engine-gpu 1                               # two GPUs

The source is a policy of recipe fp8_unified that is already quantised. Times are host seconds around a whole
publish, proof included. The yardstick, in the same run, is one copy of a GiB by torch: within the GPU (every
byte is copied twice through the transfer buffers, so half of that rate is the maximum), between the two GPUs,
or to the disk. Extra memory is the decrease of free memory on both GPUs, in both processes, from before the
link was opened to after the publishes.

Needs a GPU and vLLM; two GPUs for --links nccl.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import SHAPES, arguments, config, row, write
from benchmarks.publish import random_policy, timed
from bridges.api import GenRequest, SamplingParams, WeightTransport
from bridges.served.remote_direct import RemoteDirect
from bridges.served.remote_engine import RemoteEngine, start
from bridges.served.remote_file import RemoteFile
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.precision.recipe import FP8_WEIGHT
from jaxfp8rl.publish.wire import LearnerWeights

LINKS = ("cuda_ipc", "nccl", "file")


def main() -> None:
    parser = arguments(__doc__, "publish_remote")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=["cuda_ipc"])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["8b", "0.6b"])
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--engine-gpu", type=int, default=0, help="the engine's GPU, among the visible ones")
    parser.add_argument("--eager", action="store_true",
                        help="an engine without CUDA graphs, which starts faster")
    parser.add_argument("--folder", help="folder for the files; default: the temporary folder")
    args = parser.parse_args()
    if torch.cuda.device_count() <= args.engine_gpu:
        sys.exit(f"benchmarks/publish_remote.py needs {args.engine_gpu + 1} NVIDIA GPUs")
    rates = {kind: round(rate(kind, args.engine_gpu, args.folder), 2) for kind in args.links}
    torch.cuda.empty_cache()
    rows, phases = [], {f"yardstick of {kind}, GB/s": value for kind, value in rates.items()}
    for size in args.sizes:
        start_s = time.perf_counter()
        with contextlib.closing(engine(size, args.engine_gpu, args.eager)) as e:
            phases[f"{size}: engine's start, s"] = round(time.perf_counter() - start_s, 1)
            source = weights(size)
            print(f"{size}: engine and weights there after {time.perf_counter() - start_s:.1f} s", flush=True)
            for kind in args.links:
                bench(size, kind, e, source, args, rates[kind], rows, phases)
                write(args.out, "publish_remote", rows, args.plot, phases=phases)
            del source
        gc.collect()


def engine(size: str, gpu: int, eager: bool) -> RemoteEngine:
    """An engine that is small in everything but its weights, so that it starts quickly."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES",
                          ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    return start(
        "vllm", config(size), weights=FP8_WEIGHT, transport="in_place", max_model_len=256, max_num_seqs=4,
        kv_cache_bytes=2**28,
        gpu_memory_utilization=0.15, enforce_eager=eager, environment={"CUDA_VISIBLE_DEVICES": seen[gpu]},
    )


def weights(size: str) -> LearnerWeights:
    model = ModelConfig.from_hf(config(size))
    runs = fp8_runs(linear_shapes(model), model.num_hidden_layers)
    return LearnerWeights(model, random_policy(model, coded=True), runs, "bfloat16")


def bench(
    size: str, kind: str, e: RemoteEngine, source: LearnerWeights, args: argparse.Namespace, yardstick: float,
    rows: list,
    phases: dict,
) -> None:
    case, free = f"Qwen3-{size.upper()} {kind}", free_bytes()
    with contextlib.closing(RemoteFile() if kind == "file" else RemoteDirect(kind)) as transport:
        transport.open(e)
        times = [publish(transport, source, i) for i in range(2 if kind == "file" else args.publishes + 2)]
        receipt = times[-1][1]
        transport.verify(receipt)
        extra = free - free_bytes()
    done = e.generate([GenRequest("r", tuple(range(32)), SamplingParams(8))])[0][0]
    if problem := done.problem():
        sys.exit(f"the engine is broken after the publishes: {problem}")
    each = [ms for ms, _ in times]
    median = statistics.median(each[1:] if kind == "file" else each[2:])
    rows += [
        row(case, "publish + proof", "ms", median, receipt.bytes / yardstick / 1e6, YARDSTICKS[kind], True),
        row(case, "rate", "GB/s", receipt.bytes / median / 1e6, yardstick, YARDSTICKS[kind]),
        row(case, "extra memory", "GB", extra / 1e9, 0.0, ""),
    ]
    phases[f"{case}, ms each"] = [round(ms, 2) for ms in each]
    phases[f"{case}, bytes"] = receipt.bytes


YARDSTICKS = {"cuda_ipc": "torch's copy within the GPU, same run",
              "nccl": "torch's copy between the two GPUs, same run",
              "file": "writing to the same disk and syncing, same run"}


def publish(transport: WeightTransport, source: LearnerWeights, version: int) -> tuple[float, object]:
    """(ms, receipt)."""
    begin = time.perf_counter()
    receipt = transport.publish(source, version)
    return (time.perf_counter() - begin) * 1e3, receipt


def free_bytes() -> int:
    return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


def rate(kind: str, gpu: int, folder: str | None) -> float:
    """GB/s that arrive with one copy of a GiB."""
    if kind == "file":
        return disk_rate(folder)
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    b = torch.empty(2**30, dtype=torch.uint8, device=f"cuda:{gpu if kind == 'nccl' else 0}")

    def copy() -> None:
        b.copy_(a)
        torch.cuda.synchronize(b.device)

    found = a.nbytes / statistics.median(timed(copy) for _ in range(12)) / 1e6
    return found


def disk_rate(folder: str | None) -> float:
    data = bytes(2**30)
    with tempfile.NamedTemporaryFile(dir=folder) as f:
        begin = time.perf_counter()
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
        return len(data) / (time.perf_counter() - begin) / 1e9


if __name__ == "__main__":
    main()
