"""The time of vLLM's FP8 products in decoding: CUTLASS, DeepGEMM and bfloat16, for the linears of Qwen3-8B
with 8 to 128 rows.

    jaxfp8rl bench engine_products

Each product runs alone, in a CUDA graph over weights that together do not fit into L2. Scales are float32 for
1x128 and 128x128 blocks, as published (`VLLM_USE_DEEP_GEMM_E8M0=0`). DeepGEMM is compared with CUTLASS, in
microseconds and in the share of bitwise equal outputs, and each with the time of reading the weights at RATE.
`rollout.fp8_kernel` chooses between them.

Needs a Hopper GPU, vLLM and nvcc.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write

LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}  # [N, K]
ROWS = (8, 16, 32, 64, 128)
LAYERS = 36
RATE = 4.1e12  # bytes per second of a copy on an H200
BYTES = 4e8  # bytes of weights that a graph reads


def main() -> None:
    args = arguments(__doc__, "engine_products").parse_args()
    os.environ |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks/engine_products.py needs an NVIDIA GPU")
    rows = rows_of({(name, m): measure(*shape, m) for name, shape in LINEARS.items() for m in ROWS})
    write(args.out, "engine_products", rows, args.plot)


def rows_of(found: dict[tuple[str, int], dict[str, float]]) -> list[dict]:
    """Rows for each product and for all products of a step, DeepGEMM against the others."""
    rows = []
    for (name, m), f in found.items():
        case, floor = f"Qwen3-8B {name}, {m} rows", 1e6 * LINEARS[name][0] * LINEARS[name][1] / RATE
        rows += [row(case, "product", "us", f["DeepGEMM"], f[other], other, True)
                 for other in ("CUTLASS", "bfloat16")]
        rows += [row(case, "product", "us", f["DeepGEMM"], floor, "weights at 4.1 TB/s", True),
                 row(case, "outputs of the same bits", "share", f["equal"], 1.0, "CUTLASS")]
    for m in ROWS:
        step = {who: LAYERS * sum(found[name, m][who] for name in LINEARS) / 1e3
                for who in ("DeepGEMM", "CUTLASS", "bfloat16")}
        rows += [row(f"Qwen3-8B, all linears of a step, {m} rows", "products", "ms", step["DeepGEMM"],
                     step[other], other, True)
                 for other in ("CUTLASS", "bfloat16")]
    return rows


def measure(n: int, k: int, m: int) -> dict[str, float]:
    """Microseconds of each product, and the share of outputs that are equal with CUTLASS and DeepGEMM."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.utils.deep_gemm import fp8_gemm_nt

    torch.manual_seed(0)
    f8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=bf16)
    uniform = lambda *shape: torch.rand(*shape, device="cuda") + 0.5
    weights = [normal(n, k).to(f8) for _ in range(max(4, int(BYTES / (n * k))))]
    halves = [normal(n, k) for _ in range(max(3, len(weights) // 2))]
    a, x, out = normal(m, k).to(f8), normal(m, k), torch.empty(m, n, device="cuda", dtype=bf16)
    a_scale, w_scale = uniform(k // 128, m).t(), uniform(n // 128, k // 128)
    cutlass = lambda w: ops.cutlass_scaled_mm(a, w.T, out_dtype=bf16, scale_a=a_scale, scale_b=w_scale.T)
    deep_gemm = lambda w: fp8_gemm_nt((a, a_scale), (w, w_scale), out)
    bfloat16 = lambda w: x @ w.t()
    found = {"CUTLASS": time(cutlass, weights), "DeepGEMM": time(deep_gemm, weights),
             "bfloat16": time(bfloat16, halves)}
    deep_gemm(weights[0])
    return found | {"equal": (cutlass(weights[0]) == out).float().mean().item()}


def time(product: Callable, weights: list, replays: int = 7) -> float:
    """Microseconds per product: the median over replays of a graph with one product for each of `weights`."""
    import torch

    for w in weights:
        product(w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            product(w)
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(weights) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
