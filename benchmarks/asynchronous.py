"""Asynchronous rollouts: how long a publish stops the decoding of a served engine, and a step whose learner
and engine work side by side.

    jaxfp8rl bench asynchronous stall [--sizes 8b] [--prompts 64] [--publishes 6]     # one GPU
    jaxfp8rl bench asynchronous steps [--sizes 1.7b 8b] [--steps 6]                   # two GPUs
    jaxfp8rl bench asynchronous steps --learner 2 --tensor-parallel 2                 # four GPUs
    jaxfp8rl bench asynchronous steps --learner 2 --engines 2 --kill 3                # one engine is killed

stall: completions of random weights are in flight in `vllm serve`, as a run has them. A process of its own
streams four of them token by token. A publish interrupts all, with their keys and values kept or computed
again. The stall is the time between two tokens around the publish, the median over the four. The yardsticks
are the whole publish, of which the engine stands still for a part, and a decoding step.

steps: `jaxfp8rl train` with rollout.max_staleness = 1, 64 completions of up to 2,048 tokens a step, the
learner on the first GPUs and the engines on the next. The yardstick is the longer of the step's two halves:
sampling, or scoring, updating and publishing. A ratio of 1 means that the shorter half costs nothing. Medians
over the steps from the third to the last but one: beside the last nothing is sampled. A publish's bytes a
second stand beside those of a copy between two GPUs. --kill N: SIGKILL for the last engine after step N; its
requests go to the others, and it is started again. The results are async_stall.json and async_steps.json.

Needs a GPU and vLLM; two GPUs or more for `steps`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import SHAPES, arguments, config, row, write
from benchmarks.grpo import config_of
from benchmarks.processes import kill_group, printed, visible
from bridges.api import GenRequest, SamplingParams
from bridges.inside_vllm.device_pool import share
from bridges.served import serve_options, token_api
from bridges.served.serve_process import PREFIX, ServeProcesses
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
    parser.add_argument("--learner", type=int, default=1, help="its GPUs, by train.fsdp: %(default)s")
    parser.add_argument("--engines", type=int, default=1, help="servers: %(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each server: %(default)s")
    parser.add_argument("--kill", type=int, default=0, metavar="N", help="default: no engine is killed")
    parser.add_argument("--link", default="", help="default: cuda_ipc; for steps nccl")
    parser.add_argument("--staged-gib", type=float, default=0.0, help="of the learner's memory, for slots")
    parser.add_argument("--fp8-kernel", default="deep_gemm", help="rollout.fp8_kernel: %(default)s")
    parser.add_argument("--cache-gib", type=float, default=20.0, help="of the engine's cache: %(default)s")
    parser.add_argument("--eager", action="store_true", help="an engine without CUDA graphs")
    args, rows, each = parser.parse_args(), [], {}
    share()  # before JAX is asked for anything
    for size in args.sizes or (["8b"] if args.part == "stall" else ["1.7b", "8b"]):
        (stalls if args.part == "stall" else steps)(size, args, rows, each)
        write(args.out.with_stem(f"{args.out.stem}_{args.part}"), "async", rows, args.plot, each=each)


# A publish under load


class Watched:
    """Completions that another process streams token by token: this one's threads, which publish, take no
    time from it. times: when each token came, by completion; `take` adds those since."""

    COUNT = 4

    def __init__(self, url: str, token: str, new_tokens: int, vocab_size: int):
        spawn = multiprocessing.get_context("spawn")
        self.times: list[list[float]] = [[] for _ in range(self.COUNT)]
        self._said = spawn.SimpleQueue()
        bodies = [token_api.body(request(i, new_tokens), i, vocab_size, streams=True)
                  for i in range(self.COUNT)]
        self._process = spawn.Process(target=stream_all, args=(self._said, url, token, bodies), daemon=True)
        self._process.start()

    def take(self) -> None:
        while not self._said.empty():
            i, when = self._said.get()
            self.times[i].append(when)

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def stream_all(said: Any, url: str, token: str, bodies: list[dict]) -> None:
    """In a process of its own: (which, when) of each token."""
    host, headers = url.removeprefix("http://"), {"Authorization": f"Bearer {token}",
                                                  "Content-Type": "application/json"}

    def stream(i: int, body: dict) -> None:
        body["sampling_params"]["stream_interval"] = 1
        connection = http.client.HTTPConnection(host)
        connection.request("POST", token_api.PATH, json.dumps(body), headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                said.put((i, time.perf_counter()))  # the same clock in all processes

    for i, body in enumerate(bodies):
        threading.Thread(target=stream, args=(i, body)).start()


def request(i: int, new_tokens: int) -> GenRequest:
    prompt = (i, *range(1001, 1000 + PROMPT))
    return GenRequest(str(i), prompt, SamplingParams(new_tokens, stop_token_ids=()))


def stalls(size: str, args: argparse.Namespace, rows: list, each: dict) -> None:
    model = ModelConfig.from_hf(config(size, args.layers))
    source = weights(model)
    with contextlib.closing(started(model, args)) as processes:
        processes.wait_until_ready()
        for name, cache in CACHES.items():
            ways: list[ServedTransport] = []

            def way(urls, cache=cache, ways=ways):
                ways.append(ServedTransport(processes.token, args.link or "cuda_ipc", urls=urls, cache=cache,
                                            staged_bytes=int(args.staged_gib * 2**30)))
                return ways[-1]

            with contextlib.closing(ServedEngines(processes.token, way, urls=processes.urls)) as engine:
                found = interrupted(engine, source, args, ways, processes)
            case = f"Qwen3-{size.upper()}, {args.prompts} in flight, keys and values {name}"
            stall, publish, step = (statistics.median(f[k] for f in found)
                                    for k in ("stall", "publish", "step"))
            rows += [row(case, "stall of decoding", "ms", stall, publish, "the whole publish", True),
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


def interrupted(engine: ServedEngines, source: LearnerWeights, args: argparse.Namespace,
                ways: list[ServedTransport], processes: ServeProcesses) -> list[dict[str, float]]:
    """For each publish the ms of the stall, of the publish and its phases, and of a decoding step without
    one. ways: the engine's, of which the last one publishes."""
    found, version = [], engine.weight_version() or 0
    engine.publish(source, version + 1)  # opens the way
    [url], vocab_size = processes.urls, engine.capabilities().vocab_size
    with contextlib.closing(Watched(url, processes.token, args.new_tokens, vocab_size)) as watched:
        engine.submit([request(i, args.new_tokens) for i in range(watched.COUNT, args.prompts)])
        for i in range(args.publishes):
            token = (i + 1) * args.new_tokens // (args.publishes + 2)
            while min(map(len, watched.times)) < token:
                time.sleep(0.01)
                watched.take()
            before = time.perf_counter()
            receipt = engine.publish(source, version + 2 + i)  # it pauses and resumes, as in a run
            after = time.perf_counter()
            while min(times[-1] for times in watched.times) < after < time.perf_counter() < after + 60:
                time.sleep(0.01)
                watched.take()
            found.append(gaps(watched.times, before, after) | {"publish": receipt.seconds * 1e3} |
                         {name: seconds * 1e3 for name, seconds in ways[-1].phases.items()})
            print({k: round(v, 1) for k, v in found[-1].items()}, flush=True)
    engine.cancel([str(i) for i in range(args.prompts)])
    return found


def gaps(streams: list[list[float]], before: float, after: float) -> dict[str, float]:
    """{"stall", "step"}: the median over streams of the longest gap beside the publish, and of all gaps
    before it, in ms."""
    stall, step = [], []
    for times in streams:
        pairs = list(zip(times, times[1:]))
        stall += [max((b - a for a, b in pairs if b > before and a < after), default=0.0)]
        step += [b - a for a, b in pairs if b <= before]
    return {"stall": statistics.median(stall) * 1e3, "step": statistics.median(step) * 1e3}


# Learner and engine side by side


def steps(size: str, args: argparse.Namespace, rows: list, each: dict) -> None:
    needed = args.learner + args.engines * args.tensor_parallel
    # asking JAX would take the GPUs' memory from the run
    gpus = visible(needed)[:needed] if shutil.which("nvidia-smi") else []
    copied = copy_rate(gpus)
    with tempfile.TemporaryDirectory() as folder:
        cfg = beside(size, args, gpus, Path(folder))
        path, metrics = Path(folder, "config.toml"), Path(cfg.run.dir, "metrics.jsonl")
        path.write_text(dump_config(cfg))
        environment = os.environ | {"TMPDIR": folder}  # the engines' numbers are in a file there
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[: args.learner])
        with open(args.out.with_name(f"async_{size}.log"), "w") as log:
            child = subprocess.Popen([sys.executable, "-m", "jaxfp8rl", "train", str(path)], stdout=log,
                                     stderr=log, env=environment, start_new_session=True)
            try:
                if args.kill:
                    kill_engine(child, metrics, args.kill, Path(folder))
                if code := child.wait():
                    sys.exit(f"the run ended with {code}: see {log.name}")
            finally:
                kill_group(child)
        found = read_metrics(metrics)[3:-1]
    halves = {"sampling": ("time/rollout_s",),
              "learning": ("time/score_s", "time/update_s", "time/publish_s")}
    median = lambda keys: statistics.median(sum(m[k] for k in keys) for m in found)
    each_half = {name: median(keys) for name, keys in halves.items()}
    step, (longer, seconds) = median(("time/step_s",)), max(each_half.items(), key=lambda kv: kv[1])
    where = f"learner on {args.learner}, engines {args.engines} x {args.tensor_parallel}"
    case = f"Qwen3-{size.upper()}, {args.prompts} completions of up to {args.new_tokens} tokens, {where}"
    if args.kill:
        case += f", one killed after step {args.kill}"
    both, metric = sum(each_half.values()), "step, max_staleness = 1"
    sent = statistics.median(m["publish/bytes"] / m["time/publish_s"] for m in found) / 1e9
    rows += [row(case, metric, "s", step, seconds, f"{longer} alone, same steps", True),
             row(case, metric, "s", step, both, "both halves in turns, same steps", True),
             row(case, "publish", "ms", 1e3 * median(("time/publish_s",)), 1e3 * step, "the step", True)]
    if copied:
        rows.append(row(case, "publish", "GB/s", sent, copied, "a copy from one GPU to another"))
    each[case] = {"metrics": found, "config": dump_config(cfg)}


def copy_rate(gpus: list[str]) -> float:
    """GB/s of a copy from the first GPU to the last one, by a process of its own; 0 on a CPU."""
    program = """if True:
        import time, torch
        x = torch.ones(2**30, device="cuda:0")
        y = x.to("cuda:1")
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        start = time.perf_counter()
        for _ in range(5):
            y.copy_(x)
        torch.cuda.synchronize(0), torch.cuda.synchronize(1)
        print(5 * 4 * 2**30 / (time.perf_counter() - start) / 1e9)
        """
    pair = ",".join((gpus[0], gpus[-1])) if gpus else ""
    return float(printed(program, CUDA_VISIBLE_DEVICES=pair)) if gpus else 0.0


def kill_engine(run: subprocess.Popen, metrics: Path, step: int, folder: Path) -> None:
    """Kill the last engine once the run has recorded the step."""
    while run.poll() is None and (not metrics.exists() or len(read_metrics(metrics)) <= step):
        time.sleep(0.2)
    if numbers := sorted(folder.glob(f"{PREFIX}*/engine-*.pid")):
        os.killpg(int(numbers[-1].read_text()), signal.SIGKILL)


def beside(size: str, args: argparse.Namespace, gpus: list[str], folder: Path) -> Config:
    """The run of `jaxfp8rl bench grpo` with engines on other GPUs, which sample a version ahead."""
    args = argparse.Namespace(**vars(args), size=size, wgrad_inputs="128x128", old_policy="recomputed",
                              remat="mlp")
    told = config_of("fp8", args, folder).model_dump(mode="json")
    told["rollout"] |= {"engine": "served", "link": args.link or "nccl", "sleep": "off",
                        "engines": args.engines, "tensor_parallel_size": args.tensor_parallel,
                        "restarts": int(args.engines > 1),
                        "max_staleness": 1, "prompts_per_step": args.prompts // 8,
                        "enforce_eager": args.eager, "kv_cache_gib": args.cache_gib,
                        "max_num_seqs": -(-args.prompts // args.engines),
                        "server_gpus": [int(gpu) for gpu in gpus[args.learner :]]}
    told["train"] |= {"fsdp": args.learner, "rows_per_microbatch": args.learner}
    return Config.model_validate(told)


if __name__ == "__main__":
    main()
