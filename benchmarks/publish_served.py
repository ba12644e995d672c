"""The cost of a publish into stock `vllm serve`, beside vLLM's own weight transfer: Qwen3 shapes, random
weights made on the device.

    jaxfp8rl bench publish_served [--sizes 8b 0.6b] [--publishes 20]          # a GPU: cuda_ipc; two: and nccl
    jaxfp8rl bench publish_served --links shared_memory --sizes 0.6b --layers 1 --publishes 2   # a CPU

Ours is `ServedTransport`. The source is a policy of recipe fp8_unified that is already quantised, and a
publish pauses the engine, writes in place, proves every byte at every rank, and resumes. The yardstick is
vLLM's own backend (`ipc` for cuda_ipc, `nccl` for nccl) of the same tensors into the same model, in the same
run: vLLM's trainer sends packed buffers, its workers load them by vLLM's reload, and nothing is proven. Its
publish is paused and resumed, too. Times are host seconds around a whole publish. Extra memory is the
decrease of free memory on all GPUs, in both processes, from before the way was opened to after the publishes.

Engine and learner share GPU 0 for cuda_ipc; for nccl the engine has GPU 1. Each link and each yardstick has a
server of its own, one after the other. After the publishes both must say the same greedy tokens.

Needs vLLM; a GPU for cuda_ipc, two for nccl.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.common import SHAPES, arguments, config, row, write
from benchmarks.processes import free_port
from benchmarks.publish import fp8_runs_of, random_policy, timed
from bridges.api import Capabilities, GenRequest, SamplingParams, WeightSource
from bridges.inside_vllm import device_pool
from bridges.proof.manifest import nbytes
from bridges.served.serve_options import model_folder, serve_variables, serve_words
from bridges.served.serve_process import ServeProcesses
from bridges.served.served_control import Server
from bridges.served.served_transport import ServedTransport
from bridges.served.vllm_client import VllmClient
from bridges.sources.dlpack import torch_view
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.recipe import FP8_WEIGHT
from jaxfp8rl.publish.wire import LearnerWeights, high_precision_modules

BACKENDS = {"cuda_ipc": "ipc", "nccl": "nccl"}  # of vLLM, beside our link
LINKS = (*BACKENDS, "shared_memory", "file")
PROMPT = GenRequest("r", tuple(range(32)), SamplingParams(16, temperature=0.0))


def main() -> None:
    parser = arguments(__doc__, "publish_served")
    parser.add_argument("--links", nargs="+", choices=LINKS,
                        help="default: those that this machine has GPUs for")
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["8b", "0.6b"])
    parser.add_argument("--layers", type=int, default=0, help="fewer than the model has, for a trial")
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--staged-gib", type=float, default=0.0, help="of the learner's memory, for slots")
    parser.add_argument("--eager", action="store_true",
                        help="engines without CUDA graphs, which start faster")
    args = parser.parse_args()
    device_pool.share()  # before JAX makes its first array
    gpus, rows, phases = torch.cuda.device_count(), [], {}
    links = args.links or [*["cuda_ipc"] * (gpus > 0), *["nccl"] * (gpus > 1)] or ["shared_memory"]
    for size in args.sizes:
        source = weights(config(size, args.layers))
        for link in links:
            found, more = bench(size, link, source, args)
            rows += found
            phases |= more
            write(args.out, "publish_served", rows, args.plot, phases=phases, layers=args.layers)
        del source
        gc.collect()


def weights(hf: dict) -> LearnerWeights:
    model = ModelConfig.from_hf(hf)
    return LearnerWeights(model, random_policy(model, coded=True), fp8_runs_of(model), "bfloat16")


def bench(size: str, link: str, source: LearnerWeights, args: argparse.Namespace) -> tuple[list[dict], dict]:
    """Rows, and the samples that they are medians of."""
    case, phases = f"Qwen3-{size.upper()} {link}" + f", {args.layers} layers" * bool(args.layers), {}
    with serving(size, link, "jaxfp8rl", args) as processes:
        mine, extra, receipt, tokens, can, steps = ours(processes, link, source, args)
    phases |= {f"{case}, ms each": mine, f"{case}, bytes": receipt.bytes, f"{case}, ms of the last": steps}
    theirs, extra_of_theirs, name = [0.0] * 3, 0.0, ""
    if link in BACKENDS:
        name = f"vLLM's own backend {BACKENDS[link]}, without proof, same run"
        with serving(size, link, BACKENDS[link], args) as processes:
            theirs, extra_of_theirs, said = yardstick(processes, link, source, args.publishes + 2, can)
        phases |= {f"{case}, vLLM's ms each": theirs, f"{case}, both say the same tokens": said == tokens}
    median, beside = statistics.median(mine[2:]), statistics.median(theirs[2:])
    rate = copy_rate(link) if torch.cuda.is_available() else 0.0
    return [
        row(case, "publish + proof", "ms", median, beside, name, True),
        row(case, "rate", "GB/s", receipt.bytes / median / 1e6, rate,
            "one copy by torch, same run" if rate else ""),
        row(case, "extra memory", "GB", extra, extra_of_theirs, name, True),
    ], phases


@contextlib.contextmanager
def serving(size: str, link: str, backend: str, args: argparse.Namespace) -> Iterator[ServeProcesses]:
    """A server that is small in everything but its weights, so that it starts quickly."""
    hf = config(size, args.layers)
    model, cpu = ModelConfig.from_hf(hf), not torch.cuda.is_available()
    folder = model_folder(hf, FP8_WEIGHT, high_precision_modules(model, fp8_runs_of(model)))
    words = serve_words(
        vocab_size=hf["vocab_size"], dtype="bfloat16", kv_cache="auto", max_model_len=256, max_num_seqs=4,
        gpu_memory_utilization=0.15, kv_cache_bytes=2**28, enforce_eager=args.eager or cpu,
        routed_experts=False,
        attention="auto")
    variables = serve_variables("emulated" if cpu else "native")
    if backend != "jaxfp8rl":
        words = [*without(words, "--middleware", "--weight-transfer-config", "--load-format"),
                 "--weight-transfer-config", json.dumps({"backend": backend}), "--load-format", "dummy"]
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # its handles of CUDA IPC are pickles
    if not cpu:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        variables["CUDA_VISIBLE_DEVICES"] = seen.split(",")[link == "nccl"]
    with ServeProcesses(folder, words, environment=variables) as processes:
        processes.wait_until_ready()
        yield processes


def without(words: list[str], *names: str) -> list[str]:
    """The words without these options, each of which has a value."""
    at = {i + k for i, word in enumerate(words) if word in names for k in (0, 1)}
    return [word for i, word in enumerate(words) if i not in at]


def ours(processes: ServeProcesses, link: str, source: WeightSource, args: argparse.Namespace) -> tuple:
    """(ms of each publish, extra GB, the last receipt, greedy tokens, what the engine can, ms of each step of
    the last publish)."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(VllmClient(processes.urls, processes.token)))
        transport = stack.enter_context(contextlib.closing(ServedTransport(
            processes.token, link, staged_bytes=int(args.staged_gib * 2**30))))
        free = free_gb()
        transport.open(client)
        times, receipt = each(args.publishes + 2, lambda i: transport.publish(source, i))
        extra = free - free_gb()
        transport.verify(receipt)
        steps = {name: round(seconds * 1e3, 2) for name, seconds in transport.phases.items()}
        return times, extra, receipt, greedy(client), client.capabilities(), steps


def yardstick(processes: ServeProcesses, link: str, source: WeightSource, count: int,
              can: Capabilities) -> tuple[list[float], float, list[int]]:
    """(ms of each publish by vLLM's own trainer, extra GB, greedy tokens)."""
    [url], free = processes.urls, free_gb()
    control, trainer = Server(url, processes.token), trainer_of(link, url, source)

    def publish(_: int) -> None:
        control.call("/pause?mode=keep")
        trainer.send_weights()
        control.call("/reset_prefix_cache")
        control.call("/resume")

    times, _ = each(count, publish)
    extra = free - free_gb()
    with contextlib.closing(VllmClient([url], processes.token, capabilities=can)) as client:
        return times, extra, greedy(client)


def trainer_of(link: str, url: str, source: WeightSource) -> Any:
    """vLLM's end of its own way, open."""
    from vllm.distributed.weight_transfer import base, clients, ipc_engine, nccl_engine

    class Source(base.WeightSource):
        def metadata(self):
            return [base.ParamMeta(m.name, getattr(torch, m.dtype), m.shape) for m in source.manifest()]

        def __iter__(self):
            return ((name, torch_view(buffer)) for name, buffer in source)

    class Client(clients.HTTPVLLMWeightSyncClient):
        def finish_weight_update(self, weight_version=None):
            super().finish_weight_update("1")

    buffer = max(2**30, *(nbytes([m]) for m in source.manifest()))  # it must hold the largest tensor
    if link == "cuda_ipc":
        info = ipc_engine.IPCTrainerInitInfo(packed=True, rank=0, packed_buffer_size_bytes=buffer)
        return ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
            info, client=Client(url), source=Source())
    info = nccl_engine.NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=free_port(), world_size=2,
                                           rank=0, packed_buffer_size_bytes=buffer)
    return nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(info, client=Client(url), source=Source())


def each(count: int, publish: Callable[[int], Any]) -> tuple[list[float], Any]:
    """(ms of each of `count` publishes, what the last returned)."""
    times, found = [], None
    for i in range(count):
        begin = time.perf_counter()
        found = publish(i)
        times.append(round((time.perf_counter() - begin) * 1e3, 2))
    return times, found


def greedy(client: VllmClient) -> list[int]:
    [[done]] = client.generate([PROMPT])
    if problem := done.problem():
        sys.exit(f"the engine is broken after the publishes: {problem}")
    return done.token_ids.tolist()


def free_gb() -> float:
    return sum(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())) / 1e9


def copy_rate(link: str) -> float:
    """GB/s that arrive with one copy of a GiB, within the GPU, or to the other for nccl."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda:0")
    b = torch.empty(2**30, dtype=torch.uint8, device=f"cuda:{int(link == 'nccl')}")

    def copy() -> None:
        b.copy_(a)
        torch.cuda.synchronize(b.device)

    return a.nbytes / statistics.median(timed(copy) for _ in range(12)) / 1e6


if __name__ == "__main__":
    main()
