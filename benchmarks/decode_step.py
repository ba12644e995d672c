"""The breakdown of a step of vLLM's decoder: its kernels, by torch's profiler, FP8 weights and cache against
BF16; Qwen3 shapes.

    jaxfp8rl bench decode_step [--size 8b] [--prompts 64] [--context 4096] [--attention triton] [--gpus 0 1]

The engines are those of `jaxfp8rl bench rollout`. Every prompt of --context tokens is prefilled once; then
all sequences decode, and STEPS steps after the first few are measured. "kernels" is the sum of the device's
busy time over as many further steps under the profiler, "step" the host's time without the profiler; the
difference is the host's overhead.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, size_of, write
from benchmarks.rollout import RATE, measured, read_by_a_step, requests, running

STEPS = 24
SHOWN = 25  # the number of kernels that are listed


def main() -> None:
    parser = arguments(__doc__, "decode_step")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=64)
    args, found = measured(parser, measure, __file__)
    case = f"Qwen3-{size_of(args)}, {args.prompts} sequences of {args.context} tokens"
    write(args.out, "decode_step", rows_of(case, found), args.plot, each=found)


def measure(name: str, args: argparse.Namespace) -> dict:
    """Milliseconds of a step, of its kernels and of the bytes that bound it; and the longest kernels: name,
    ms and calls per step."""
    with running(name, args, args.prompts, args.context + tokens_of(args)) as r:
        run = decoding(r.engine, args)
        run()  # the remaining compilation
        began = time.perf_counter()
        run()
        step = (time.perf_counter() - began) / STEPS
        found = kernels(run)
    longest = sorted(found.items(), key=lambda item: -item[1][0])
    floor = (read_by_a_step(r.weights, args.prompts) + args.prompts * args.context * r.token_bytes) / RATE
    return {
        "step, ms": 1e3 * step, "kernels, ms": sum(ms for ms, _ in found.values()) / STEPS,
        "floor, ms": 1e3 * floor,
        "longest": [[n, round(ms / STEPS, 4), round(calls / STEPS, 1)] for n, (ms, calls) in longest[:SHOWN]],
        **r.chosen,
    }


def tokens_of(args: argparse.Namespace) -> int:
    """The number of tokens of a completion, large enough that none ends: while prompts are prefilled, at
    least one per step, earlier sequences already decode."""
    return args.prompts + 4 * STEPS


def decoding(engine: Any, args: argparse.Namespace) -> Callable[[], None]:
    """Prefill all prompts. Returns a function that runs STEPS decoding steps, each with a token of every
    sequence; call it at most three times."""
    from bridges.inside_vllm.sampling import sampling_params

    vllm = engine.llm.llm_engine
    for r in requests(args.prompts, args.context, tokens_of(args)):
        vllm.add_request(r.request_id, {"prompt_token_ids": list(r.prompt_token_ids)},
                         sampling_params(r.sampling, r.seed))
    begun: set[str] = set()
    while len(begun) < args.prompts:
        begun |= {out.request_id for out in vllm.step()}

    def run() -> None:
        for _ in range(STEPS):
            if len(vllm.step()) != args.prompts:
                sys.exit("a step did not decode all sequences")

    return run


def kernels(run: Callable[[], None]) -> dict[str, list[float]]:
    """Milliseconds on the device and calls, by kernel name."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in profile.key_averages():
        found[event.key[:120]][0] += event.self_device_time_total / 1e3
        found[event.key[:120]][1] += event.count
    return found


def rows_of(case: str, found: dict[str, dict]) -> list[dict]:
    """Rows of FP8 against BF16, and of the host's overhead over each engine's kernels."""
    fp8, bf16 = found["fp8"], found["bf16"]
    rows = [row(case, what, "ms", fp8[f"{what}, ms"], bf16[f"{what}, ms"], "BF16 vLLM, same run", True)
            for what in ("step", "kernels")]
    for name, f in found.items():
        rows.append(row(f"{case}, {name}", "step", "ms", f["step, ms"], f["kernels, ms"], "its kernels",
                        True))
        rows.append(row(f"{case}, {name}", "kernels", "ms", f["kernels, ms"], f["floor, ms"],
                        "bytes at 4.1 TB/s", True))
    return rows


if __name__ == "__main__":
    main()
