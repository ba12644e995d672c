"""Asynchronous rollouts: how long a publish stops the decoding of a served engine, and a step whose learner
and engine work side by side.

    jaxfp8rl bench asynchronous stall [--sizes 8b] [--prompts 64] [--publishes 6]     # one GPU
    jaxfp8rl bench asynchronous steps [--sizes 1.7b 8b] [--steps 6]                   # two GPUs

stall: completions of random weights are in flight in `vllm serve` and streamed token by token. A publish
interrupts them, with their keys and values kept or computed again. The stall is the longest time between two
tokens of a completion around the publish, the median over completions. The yardstick is the publish alone,
between two decoding steps of which it could be no shorter.

steps: `jaxfp8rl train` with rollout.max_staleness = 1, 64 completions of up to 2,048 tokens a step, the
learner on one GPU and the engine on the other. The yardstick is the longer of the step's two halves:
sampling, or scoring, updating and publishing. A ratio of 1 means that the shorter half costs nothing. Medians
over the steps after the second. The results are async_stall.json and async_steps.json.

Needs a GPU and vLLM; two GPUs for `steps`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import SHAPES, arguments, config, row, write
from benchmarks.grpo import config_of
from bridges.api import GenRequest, SamplingParams
from bridges.inside_vllm.device_pool import share
from bridges.served import parts, serve_options, token_api
from bridges.served.serve_process import ServeProcesses
from bridges.served.served_engines import ServedEngines
from bridges.served.served_transport import ServedTransport
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.precision.recipe import FP8_WEIGHT
from jaxfp8rl.publish.wire import LearnerWeights

PROMPT = 256
CACHES = {"kept": "keep", "computed again": "recompute"}


def main() -> None:
    parser = arguments(__doc__, "async")
    parser.add_argument("part", choices=["stall", "steps"])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, help="default: 8b; for steps 1.7b and 8b")
    parser.add_argument("--layers", type=int, default=0, help="of the models; default: all")
    parser.add_argument("--prompts", type=int, default=64, help="completions in flight: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=2048)
    parser.add_argument("--publishes", type=int, default=6, help="for each kind of cache: %(default)s")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--link", default="", help="default: cuda_ipc; for steps nccl")
    parser.add_argument("--fp8-kernel", default="deep_gemm", help="rollout.fp8_kernel: %(default)s")
    parser.add_argument("--cache-gib", type=float, default=20.0, help="of the engine's cache: %(default)s")
    parser.add_argument("--eager", action="store_true", help="an engine without CUDA graphs")
    args, rows, each = parser.parse_args(), [], {}
    share()  # before JAX is asked for anything
    for size in args.sizes or (["8b"] if args.part == "stall" else ["1.7b", "8b"]):
        (stalls if args.part == "stall" else steps)(size, args, rows, each)
        write(args.out.with_stem(f"{args.out.stem}_{args.part}"), "async", rows, args.plot, each=each)


# A publish under load


class Timed(parts.Stream):
    """It keeps the times at which its tokens came."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        STREAMS.append(self)

    def take(self, piece: bytes) -> None:
        self.times.append(time.perf_counter())
        super().take(piece)


STREAMS: list[Timed] = []


def stalls(size: str, args: argparse.Namespace, rows: list, each: dict) -> None:
    parts.Stream, token_api.MOST_TOKENS = Timed, 1  # an event a token
    model = ModelConfig.from_hf(config(size, args.layers))
    source = weights(model)
    with contextlib.closing(started(model, args)) as processes:
        processes.wait_until_ready()
        for name, cache in CACHES.items():
            way = lambda urls, cache=cache: ServedTransport(
                processes.token, args.link or "cuda_ipc", urls=urls, cache=cache)
            with contextlib.closing(ServedEngines(processes.token, way, urls=processes.urls)) as engine:
                found = interrupted(engine, source, args)
            case = f"Qwen3-{size.upper()}, {args.prompts} in flight, keys and values {name}"
            stall, publish, step = (statistics.median(f[k] for f in found)
                                    for k in ("stall", "publish", "step"))
            rows += [row(case, "stall of decoding", "ms", stall, publish, "the publish alone", True),
                     row(case, "stall of decoding", "ms", stall, step, "a decoding step", True)]
            each[case] = found


def weights(model: ModelConfig) -> LearnerWeights:
    from benchmarks.publish import random_policy

    runs = fp8_runs(linear_shapes(model), model.num_hidden_layers)
    return LearnerWeights(model, random_policy(model, coded=True), runs, "bfloat16")


def started(model: ModelConfig, args: argparse.Namespace) -> ServeProcesses:
    folder = serve_options.model_folder(model.to_hf(), FP8_WEIGHT)
    words = serve_options.serve_words(
        vocab_size=model.vocab_size, dtype="bfloat16", kv_cache="auto",
        max_model_len=PROMPT + args.new_tokens, max_num_seqs=args.prompts, gpu_memory_utilization=0.5,
        kv_cache_bytes=int(args.cache_gib * 2**30), enforce_eager=args.eager, routed_experts=False,
        attention="auto")
    return ServeProcesses(folder, words, environment=serve_options.serve_variables(args.fp8_kernel),
                          logs=args.out.parent / "async_logs")


def interrupted(engine: ServedEngines, source: LearnerWeights,
                args: argparse.Namespace) -> list[dict[str, float]]:
    """For each publish the ms of the stall, of the publish, and of a decoding step without one."""
    found, version = [], engine.weight_version() or 0
    engine.publish(source, version + 1)  # opens the way
    STREAMS.clear()
    prompt = tuple(range(1000, 1000 + PROMPT))
    sampling = SamplingParams(args.new_tokens, stop_token_ids=())
    engine.submit([GenRequest(str(i), (i, *prompt[1:]), sampling) for i in range(args.prompts)])
    for i in range(args.publishes):
        token = (i + 1) * args.new_tokens // (args.publishes + 2)
        while min(len(s.times) for s in STREAMS) < token or len(STREAMS) < args.prompts:
            time.sleep(0.01)
        before = time.perf_counter()
        receipt = engine.publish(source, version + 2 + i)  # it pauses and resumes, as in a run
        after = time.perf_counter()
        while min(s.times[-1] for s in STREAMS) < after < time.perf_counter() < after + 60:
            time.sleep(0.01)
        found.append(gaps(before, after) | {"publish": receipt.seconds * 1e3})
        print({k: round(v, 2) for k, v in found[-1].items()}, flush=True)
    engine.cancel([str(i) for i in range(args.prompts)])
    return found


def gaps(before: float, after: float) -> dict[str, float]:
    """{"stall", "step"}: the median over streams of the gap that spans the publish, and of all others, in
    ms."""
    stall, step = [], []
    for times in [list(s.times) for s in STREAMS]:
        pairs = list(zip(times, times[1:]))
        stall += [max((b - a for a, b in pairs if b > before and a < after), default=0.0)]
        step += [b - a for a, b in pairs if b <= before]
    return {"stall": statistics.median(stall) * 1e3, "step": statistics.median(step) * 1e3}


# Learner and engine side by side


def steps(size: str, args: argparse.Namespace, rows: list, each: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cfg, gpus = beside(size, args, Path(folder)), visible()
        path = Path(folder, "config.toml")
        path.write_text(dump_config(cfg))
        with open(args.out.with_name(f"async_{size}.log"), "w") as log:
            subprocess.run([sys.executable, "-m", "jaxfp8rl", "train", str(path)], stdout=log, stderr=log,
                           check=True, env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {}))
        found = read_metrics(Path(cfg.run.dir, "metrics.jsonl"))[3:]
    halves = {"sampling": ("time/rollout_s",),
              "learning": ("time/score_s", "time/update_s", "time/publish_s")}
    median = lambda keys: statistics.median(sum(m[k] for k in keys) for m in found)
    each_half = {name: median(keys) for name, keys in halves.items()}
    step, (longer, seconds) = median(("time/step_s",)), max(each_half.items(), key=lambda kv: kv[1])
    case = f"Qwen3-{size.upper()}, {args.prompts} completions of up to {args.new_tokens} tokens, two GPUs"
    both, metric = sum(each_half.values()), "step, max_staleness = 1"
    rows += [row(case, metric, "s", step, seconds, f"{longer} alone, same steps", True),
             row(case, metric, "s", step, both, "both halves in turns, same steps", True)]
    each[case] = {"metrics": found, "config": dump_config(cfg)}


def visible() -> list[str]:
    """The numbers of two GPUs; none on a CPU."""
    if not shutil.which("nvidia-smi"):  # asking JAX would take the GPU's memory from the runs
        return []
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]


def beside(size: str, args: argparse.Namespace, folder: Path) -> Config:
    """The run of `jaxfp8rl bench grpo` with an engine on another GPU, which samples a version ahead."""
    args = argparse.Namespace(**vars(args), size=size, wgrad_inputs="128x128", old_policy="recomputed",
                              remat="mlp")
    told, gpus = config_of("fp8", args, folder).model_dump(mode="json"), visible()
    told["rollout"] |= {"engine": "served", "link": args.link or "nccl", "sleep": "off", "restarts": 0,
                        "max_staleness": 1, "prompts_per_step": args.prompts // 8,
                        "enforce_eager": args.eager, "kv_cache_gib": args.cache_gib,
                        "max_num_seqs": args.prompts, "server_gpus": [int(gpus[1])] if gpus else []}
    return Config.model_validate(told)


if __name__ == "__main__":
    main()
