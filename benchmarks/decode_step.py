"""Where a step of vLLM's decoder goes: its kernels, by torch's profiler, FP8 weights and cache beside BF16; Qwen3 shapes.

    jaxfp8rl bench decode_step [--size 8b] [--prompts 64] [--context 4096] [--attention triton] [--gpus 0 1]

Engines are those of `jaxfp8rl bench rollout`. Every prompt has --context tokens, which the cache holds already: what is counted
is the difference between completions of FEW and of MANY tokens, so of steps of decoding alone. "kernels" is the sum of what the
device was busy with, and "step" what the host waited, without the profiler: what is more of it is the host's.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import collections
import functools
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.rollout import RATE, generate, measured, read_by_a_step, running, size_of

FEW, MANY = 16, 48  # tokens of a completion
SHOWN = 25  # kernels


def main() -> None:
    parser = arguments(__doc__, "decode_step")
    parser.add_argument("--context", type=int, default=4096)
    args, found = measured(parser, measure, __file__)
    case = f"Qwen3-{size_of(args)}, {args.prompts} sequences of {args.context} tokens"
    write(args.out, "decode_step", rows_of(case, found), args.plot, each=found)


def measure(name: str, args: argparse.Namespace) -> dict:
    """ms of a step, of its kernels, of the bytes that bound it; and the longest kernels: name, ms and calls of a step."""
    with running(name, args, args.context + MANY) as r:
        run = functools.partial(generate, r.engine, args.prompts, args.context)
        run(MANY)  # compiles what is left to compile, and fills the cache
        step = min(run(MANY) - run(FEW) for _ in range(3)) / (MANY - FEW)
        few, many = (kernels(functools.partial(run, tokens)) for tokens in (FEW, MANY))
    of_a_step = {n: [(many[n][i] - few[n][i]) / (MANY - FEW) for i in range(2)] for n in many}
    longest = sorted(of_a_step.items(), key=lambda item: -item[1][0])
    floor = (read_by_a_step(r.weights, args.prompts) + args.prompts * args.context * r.token_bytes) / RATE
    return {
        "step, ms": 1e3 * step, "kernels, ms": sum(ms for ms, _ in of_a_step.values()), "floor, ms": 1e3 * floor,
        "longest": [[n, round(ms, 4), round(calls, 1)] for n, (ms, calls) in longest[:SHOWN]], **r.chosen,
    }  # fmt: skip


def kernels(run: Callable) -> dict[str, list[float]]:
    """By name: ms on the device and calls."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in profile.key_averages():
        found[event.key[:120]][0] += event.self_device_time_total / 1e3
        found[event.key[:120]][1] += event.count
    return found


def rows_of(case: str, found: dict[str, dict]) -> list[dict]:
    """FP8 beside BF16, and what the host adds to each engine's kernels."""
    fp8, bf16 = found["fp8"], found["bf16"]
    rows = [row(case, what, "ms", fp8[f"{what}, ms"], bf16[f"{what}, ms"], "BF16 vLLM, same run", True)
            for what in ("step", "kernels")]  # fmt: skip
    for name, f in found.items():
        rows.append(row(f"{case}, {name}", "step", "ms", f["step, ms"], f["kernels, ms"], "its kernels", True))
        rows.append(row(f"{case}, {name}", "kernels", "ms", f["kernels, ms"], f["floor, ms"], "bytes at 4.1 TB/s", True))
    return rows


if __name__ == "__main__":
    main()
