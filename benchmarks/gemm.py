"""The scaled FP8 products against XLA's bfloat16, cuBLASLt's FP8 blockwise product and DeepGEMM, in one
process on one GPU.

    jaxfp8rl bench gemm [--tokens 4096 16384] [--tune]

cuBLASLt is called through torch's `scaled_mm`, DeepGEMM through vLLM; a yardstick that is not installed is
skipped with a message. Every round times all of them in rotating order, by the host's clock around calls that
are queued together. JAX runs one program over all inputs. For short products torch runs a CUDA graph over
them, and JAX's program repeats them for 10 ms. Results are medians over rounds. Inputs and results rotate, or
they would stay in the cache; results are bfloat16, those of wgrad float32. --tune times every entry of
CANDIDATES, FOR_WGRAD or FEW_ROWS of `blockwise_matmul/tiles.py` instead of the chosen tiles and writes
nothing; `choose` is based on it. All programs are compiled before the first is timed: ours in threads,
DeepGEMM's in processes, into its cache on disk.

Needs a GPU; torch and vLLM for all its yardsticks.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import arguments, row, write
from pallas_kernels.blockwise_matmul import api, reference
from pallas_kernels.blockwise_matmul.tiles import CANDIDATES, FEW_ROWS, FOR_WGRAD, Tiles
from pallas_kernels.quantize import api as quantize

QWEN3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
SQUARES = [(8192, 8192, 8192), (8192, 4096, 4096)]
DECODE = 64  # tokens up to which reading the weights dominates
SHORT = 2.5e-4  # seconds; for shorter products the host's time per call would be visible
# seconds of work in a measurement, or a program of short ones: XLA takes 150 us to begin one of eight sets
QUEUED = 1e-2


class Product(NamedTuple):
    """a [M, K] b [N, K]^T. `wgrad`: both in 1x128 blocks, with a float32 result."""

    name: str
    m: int
    n: int
    k: int
    wgrad: bool

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def decode(self) -> bool:
        return self.m <= DECODE

    @property
    def short(self) -> bool:
        return self.floor < SHORT

    @property
    def sets(self) -> int:
        """The number of sets of operands and results, used in rotation, so that a product cannot reuse
        another's data in the cache."""
        return 8 if self.short else 2

    @property
    def turns(self) -> int:
        """The number of passes over the sets in one JAX program."""
        return max(1, round(QUEUED / (self.sets * self.floor))) if self.short else 1

    @property
    def floor(self) -> float:
        """An approximate lower bound in seconds."""
        return max(self.flops / 1.5e15, self.n * self.k / 4.5e12)

    def __str__(self) -> str:
        return f"{self.name} {self.m} x {self.n} x {self.k}"


def products(tokens: list[int]) -> list[Product]:
    """The products to time. dgrad is an fprop of other sizes: y [T, N] = x W^T, dx [T, K] = dy W, dw [N, K] =
    dy^T x."""
    found = [Product("square", *size, False) for size in SQUARES]
    for t in tokens:
        for name, (n, k) in QWEN3_8B.items():
            found += [Product(f"{name} fprop", t, n, k, False)]
            if t > DECODE:
                found += [Product(f"{name} dgrad", t, k, n, False), Product(f"{name} wgrad", n, k, t, True)]
    return found


def main() -> None:
    parser = arguments(__doc__, "gemm")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--only", nargs="+", default=[],
                        help="only products whose names begin with this: square, qkv, o, gate_up, down")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    candidates = lambda product: FOR_WGRAD if product.wgrad else FEW_ROWS if product.decode else CANDIDATES
    tiles = lambda product: candidates(product) if args.tune else {"ours": None}
    chosen = [p for p in products(args.tokens) if not args.only or p.name.split()[0] in args.only]
    with ThreadPoolExecutor() as threads, ProcessPoolExecutor(
            4, get_context("spawn"), leave_memory) as processes:
        warming = [processes.submit(warm, product) for product in chosen if not product.wgrad]
        compiled = {product: compiling(product, tiles(product), threads) for product in chosen}
        for done in warming:
            done.result()
    rows, bandwidth = [], copy_bandwidth()
    for product in chosen:
        made = [operands(product, seed) for seed in range(product.sets)]
        runs = ours(product, made, compiled[product]) | yardsticks(product, made)
        times = measure(runs, product, args.rounds)
        speed = {name: product.flops / seconds / 1e12 for name, seconds in times.items()}
        print(f"{product!s:36}", "  ".join(f"{name} {value:.0f}" for name, value in speed.items()),
              flush=True)
        if not args.tune:
            own = speed.pop("ours")
            rows += [row(str(product), "product", "TFLOP/s", own, value, name)
                     for name, value in speed.items()]
            if product.decode:
                rate = product.n * product.k / times["ours"] / 1e12
                rows.append(row(str(product), "weights read", "TB/s", rate, bandwidth, "copy"))
                print(f"{product!s:36} {rate:.2f} of {bandwidth:.2f} TB/s", flush=True)
    if not args.tune:
        write(args.out, "gemm", rows, args.plot)


@functools.partial(jax.jit, static_argnums=0)
def _draw(product: Product, seed: int) -> tuple:
    keys = jax.random.split(jax.random.key(seed), 2)
    return tuple(jax.random.normal(key, (rows, product.k), jnp.bfloat16)
                 for key, rows in zip(keys, (product.m, product.n)))


def operands(product: Product, seed: int) -> tuple:
    """(a, b) in bfloat16 and (codes, scale, codes, scale)."""
    a, b = _draw(product, seed)
    of_b = quantize.quantize_rows if product.wgrad else quantize.quantize_blocks
    return (a, b), (*jax.jit(quantize.quantize_rows)(a), *jax.jit(of_b)(b))


def compiling(product: Product, tiles: dict[str, Tiles | None], threads: Executor) -> dict[str, Future]:
    """By name, our program of a product over all sets of operands in rotation: a single call takes the host
    longer than a short product takes the GPU. Scales have the layout that the quantisers write and the kernel
    reads, as in a model's jit."""
    struct, blocks = jax.ShapeDtypeStruct, product.k // 128
    b_scale = (blocks, product.n) if product.wgrad else (product.n // 128, blocks)
    codes = (struct((rows, product.k), jnp.float8_e4m3fn) for rows in (product.m, product.n))
    scales = (struct(shape, jnp.float32) for shape in ((blocks, product.m), b_scale))
    (a, b), (sa, sb) = codes, scales

    def run(a, sa, b, sb, tiles):
        f = api.wgrad if product.wgrad else api.blockwise_matmul
        return f(a, sa.T, b, sb.T if product.wgrad else sb, backend="pallas", tiles=tiles)

    def program(tiles):
        return in_turns(jax.jit(functools.partial(run, tiles=tiles)),
                        product.turns).lower([(a, sa, b, sb)] * product.sets)

    return {name: threads.submit(program(t).compile) for name, t in tiles.items()}


def ours(product: Product, made: list, compiled: dict[str, Future]) -> dict[str, Callable[[int], object]]:
    """By name: call number -> result. Checked against the reference on its first rows."""
    stored = [(a, sa.T, b, sb.T if product.wgrad else sb) for _, (a, sa, b, sb) in made]
    runs = {}
    for name, future in compiled.items():
        runs[name] = by_call(future.result(), stored, product.turns)
        check(product, runs[name](0), made[-1][1])
    return runs


def in_turns(f: Callable, turns: int) -> Callable:
    """A program that runs f over all sets of operands, `turns` times, and returns the last results."""

    @jax.jit
    def program(sets):
        once = lambda sets: [f(*operands) for operands in sets]
        # otherwise XLA would compute each product only once
        after = lambda results: jax.lax.optimization_barrier((sets, results))[0]
        return jax.lax.fori_loop(1, turns, lambda _, results: once(after(results)), once(sets))

    return program


def by_call(program: Callable, stored: list, turns: int) -> Callable[[int], object]:
    """Call number -> the last result of a program from `in_turns`."""
    last = None

    def run(i: int):
        nonlocal last
        if i % (len(stored) * turns) == 0:
            last = program(stored)[-1]
        return last

    return run


def leave_memory() -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def warm(product: Product) -> None:
    """Run in its own process: DeepGEMM compiles a kernel per shape, which takes seconds."""
    try:
        deep_gemm(product, [torch_operands(operands(product, 0)[1])])(0)
    except (ImportError, RuntimeError, AttributeError, AssertionError):
        pass  # `yardsticks` reports it


def as_graph(run: Callable[[int], object], count: int) -> Callable[[int], object]:
    """`count` calls of a torch library as one CUDA graph, for the same reason. It keeps a reference to `run`,
    whose arrays it reads."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            run(i)
    return lambda i, run=run: graph.replay() if i % count == 0 else None


def copy_bandwidth() -> float:
    """TB/s, reads and writes together, of torch's copy of 1 GiB."""
    try:
        import torch
    except ImportError:
        return float("nan")
    a, b = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * 2**30 / seconds(lambda i: a.copy_(b), 20) / 1e12


def check(product: Product, y, codes: tuple, rows: int = 128) -> None:
    want = (reference.wgrad if product.wgrad
            else reference.blockwise_matmul)(codes[0][:rows], codes[1][:rows], *codes[2:])
    error = jnp.linalg.norm(y[:rows].astype(jnp.float32) - want) / jnp.linalg.norm(want)
    if not error < 3e-3:
        raise SystemExit(f"{product}: relative error {float(error):.2e} against the reference")


def yardsticks(product: Product, made: list) -> dict[str, Callable[[int], object]]:
    dtype = jnp.float32 if product.wgrad else jnp.bfloat16
    dot = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())),
                                                   preferred_element_type=dtype))
    plain = [operands for operands, _ in made]
    found = {"XLA bf16": by_call(in_turns(dot, product.turns).lower(plain).compile(), plain, product.turns)}
    for name, of in (("cuBLASLt FP8 blockwise", cublaslt), ("DeepGEMM", deep_gemm)):
        try:
            found[name] = of(product, [torch_operands(codes) for _, codes in made])
            found[name](0)
            if product.short:
                found[name] = as_graph(found[name], product.sets)
        except (ImportError, RuntimeError, NotImplementedError, AttributeError, ValueError,
                AssertionError) as e:
            found.pop(name, None)
            print(f"{product}: no {name}: {str(e).splitlines()[0]}", flush=True)
    return found


def torch_operands(codes: tuple) -> tuple:
    import torch

    return tuple(torch.from_dlpack(x) for x in codes)


def by_column(scale):
    """Scales contiguous along the rows of their operand, as both libraries need. The conversion is not
    timed."""
    return scale.t().contiguous().t()


def cublaslt(product: Product, made: list) -> Callable[[int], object]:
    import torch
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    plain = SwizzleType.NO_SWIZZLE
    kind = ScalingType.BlockWise1x128 if product.wgrad else ScalingType.BlockWise128x128
    dtype = torch.float32 if product.wgrad else torch.bfloat16
    results = [None] * product.sets  # kept alive, or all would share one buffer, which stays in cache

    def run(i: int, turned: bool):
        a, b, sa, sb = ready[i % product.sets]
        results[i % product.sets] = y = scaled_mm(
            a, b.t(), sa, ScalingType.BlockWise1x128, sb.t() if turned else sb, kind, swizzle_a=plain,
            swizzle_b=plain,
            output_dtype=dtype, use_fast_accum=False,
        )
        return y

    ready = [(a, b, by_column(sa), by_column(sb) if product.wgrad else sb) for a, sa, b, sb in made]
    try:  # versions of torch differ in the layout of b's scales
        run(0, False)
    except (RuntimeError, ValueError):
        return functools.partial(run, turned=True)
    return functools.partial(run, turned=False)


def deep_gemm(product: Product, made: list) -> Callable[[int], object]:
    import torch
    import vllm.third_party.deep_gemm as library

    if product.wgrad:
        raise NotImplementedError("its 1x128 by 1x128 product needs another layout of scales")
    empty = lambda: torch.empty(product.m, product.n, dtype=torch.bfloat16, device="cuda")
    ready = [(a, by_column(sa), b, sb, empty()) for a, sa, b, sb in made]

    def run(i: int):
        a, sa, b, sb, out = ready[i % product.sets]
        library.fp8_gemm_nt((a, sa), (b, sb), out, disable_ue8m0_cast=True)
        return out

    return run


def measure(runs: dict[str, Callable[[int], object]], product: Product, rounds: int) -> dict[str, float]:
    """The median seconds per call."""
    together = product.sets * product.turns
    calls = -(-max(2 * together, round(QUEUED / product.floor)) // together) * together
    return medians(runs, rounds, calls)


def medians(runs: dict[Any, Callable[[int], object]], rounds: int, calls: int) -> dict[Any, float]:
    """The median seconds per call of each: every round times all programs, in alternating order."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(runs[name], calls))
    return {name: statistics.median(t) for name, t in times.items()}


def seconds(run: Callable[[int], object], calls: int) -> float:
    wait(run(0))
    start = time.perf_counter()
    for i in range(calls):
        last = run(i)
    wait(last)
    return (time.perf_counter() - start) / calls


def wait(result) -> None:
    """Wait for a result and for everything queued before it."""
    if any(isinstance(x, jax.Array) for x in jax.tree.leaves(result)):
        jax.block_until_ready(result)
    else:
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
