"""The grouped FP8 products of a mixture of experts against JAX's bfloat16 kernels and DeepGEMM, in one
process on one GPU.

    jaxfp8rl bench grouped [--tune]

128 experts share 131,072 rows with log-normal loads. TFLOP/s count only those rows: the work on padding is
our overhead, and so are the tables made from the sizes on the device. The yardsticks are `ragged_dot_mgpu`
and `transposed_ragged_dot_mgpu` (bfloat16, unpadded rows, the fastest of a few of their configurations),
DeepGEMM's contiguous grouped product (padded like ours), and our dense product with as many operations, a
practical upper bound. wgrad, whose result is float32, is also timed with a bfloat16 result, as JAX's kernel
has. Timed as in benchmarks/gemm.py. --tune times every entry of `sm90.FORWARD` and `sm90.WEIGHTS` against the
dense product and writes nothing.

Needs a GPU; vLLM for DeepGEMM.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, row, write
from benchmarks.gemm import medians
from pallas_kernels.blockwise_matmul import api as dense
from pallas_kernels.grouped_matmul import api, reference, sm90
from pallas_kernels.quantize import api as quantize

EXPERTS, ROWS = 128, 131_072
SHAPES = [(1536, 2048), (2048, 1536)]  # (N, K); the dgrad of each is the other
SPREAD = 1.0  # the standard deviation of the log of an expert's share
FORWARD_TILES = [(128, 128, 64, 4, 8), (128, 128, 64, 5, 4), (64, 256, 64, 4, 4)]  # of ragged_dot_mgpu
# of transposed_ragged_dot_mgpu
WEIGHT_TILES = [(128, 128, 64, 4, 1), (128, 128, 64, 5, 4), (64, 256, 64, 4, 1)]
CALLS = 8  # queued together; operands exceed the L2 cache, so one set is enough
DENSE, OURS = "our dense FP8", "ours"
ROUNDED = f"{OURS}, result in bfloat16"
Runs = dict[str, Callable[[int], object]]


class Case(NamedTuple):
    """y [R, N] = x [R, K] w[expert]^T [N, K], or `wgrad`: dw [E, N, K] = dy^T x over each expert's rows."""

    n: int
    k: int
    wgrad: bool
    seed: int

    @property
    def flops(self) -> float:
        return 2.0 * ROWS * self.n * self.k

    def __str__(self) -> str:
        product = "wgrad" if self.wgrad else "fprop"
        return f"{product} {self.k} -> {self.n}, {EXPERTS} experts, {ROWS} rows, seed {self.seed}"


def main() -> None:
    parser = arguments(__doc__, "grouped")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=["fprop", "wgrad"])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    rows, sizes = [], {}
    for case in [Case(n, k, wgrad, seed) for seed in range(args.seeds) for wgrad in (False, True)
                 for n, k in SHAPES]:
        if args.only and not str(case).startswith(args.only):
            continue
        speed = time_case(case, args.tune, args.rounds)
        sizes[case.seed] = group_sizes(case.seed).tolist()
        if args.tune:
            print(case, *(f"| {name} {value:.0f}" for name, value in speed.items()), flush=True)
        else:
            own = {name: speed.pop(name) for name in (OURS, ROUNDED) if name in speed}
            rows += [row(str(case), f"grouped product{made.removeprefix(OURS)}", "TFLOP/s", own[made], value,
                         name)
                     for made in own for name, value in speed.items()]
            write(args.out, "grouped", rows, args.plot, group_sizes=sizes)


def time_case(case: Case, tune: bool, rounds: int) -> dict[str, float]:
    """TFLOP/s by name."""
    tiles = sm90.WEIGHTS if case.wgrad else sm90.FORWARD
    groups = jax.jit(api.plan_groups, static_argnums=1)(jnp.asarray(group_sizes(case.seed)), ROWS)
    plain = draw(case, case.seed)
    codes = quantised(case, groups, *plain)
    options = {name: {"tiles": choice} for name, choice in tiles.items()} if tune else {OURS: {}}
    if case.wgrad and not tune:
        options[ROUNDED] = {"out_dtype": jnp.bfloat16}
    runs = ours(case, groups, codes, options)
    runs |= {DENSE: dense_product(case, codes)} | ({} if tune else yardsticks(case, groups, plain, codes))
    return {name: case.flops / time / 1e12 for name, time in measure(runs, rounds).items()}


def measure(runs: Runs, rounds: int) -> dict[str, float]:
    """The median seconds per call, by name."""
    return medians(runs, rounds, CALLS)


def group_sizes(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    share = rng.lognormal(0, SPREAD, EXPERTS)
    return rng.multinomial(ROWS, share / share.sum()).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def draw(case: Case, seed: int) -> tuple:
    """x [R, K] and w [E, N, K], or dy [R, N] for wgrad, in bfloat16."""
    keys = jax.random.split(jax.random.key(seed))
    other = (ROWS, case.n) if case.wgrad else (EXPERTS, case.n, case.k)
    return tuple(jax.random.normal(key, shape, jnp.bfloat16)
                 for key, shape in zip(keys, ((ROWS, case.k), other)))


@functools.partial(jax.jit, static_argnums=0)
def quantised(case: Case, groups: api.Groups, x, other) -> tuple:
    """Codes and scales, with scales in the layout that quantisers write and the kernels read."""
    x = api.pad_rows(x, groups)
    if not case.wgrad:
        codes, scale = quantize.quantize_rows(x, backend="reference")
        return codes, scale.T, *jax.lax.map(lambda w: quantize.quantize_blocks(w, backend="reference"), other)
    of_tokens = functools.partial(quantize.quantize_tokens, backend="reference")
    return tuple(a for codes, scale in map(of_tokens, (api.pad_rows(other, groups), x))
                 for a in (codes, scale.T))


def ours(case: Case, groups: api.Groups, codes: tuple, options: dict[str, dict]) -> Runs:
    """By name, the product compiled with these options: call number -> result. Checked against the reference,
    each expert by its own norm."""

    def product(f, groups, a, sa, b, sb, **options):
        return f(a, sa.T, b, sb.T if case.wgrad else sb, groups, **options)

    name = "grouped_wgrad" if case.wgrad else "grouped_matmul"
    want = jax.jit(functools.partial(product, getattr(reference, name)))(groups, *codes)
    programs = [functools.partial(product, getattr(api, name), backend="pallas", **chosen)
                for chosen in options.values()]
    runs = {}
    for label, f in zip(options, compiled([jax.jit(f).lower(groups, *codes) for f in programs])):
        if not (error := float(worst_expert(case, groups, f(groups, *codes), want))) < 3e-3:
            raise SystemExit(f"{case}, {label}: relative error {error:.2e} against the reference")
        runs[label] = lambda i, f=f: f(groups, *codes)
    return runs


def compiled(lowered: list) -> list[Callable]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


@functools.partial(jax.jit, static_argnums=0)
def worst_expert(case: Case, groups: api.Groups, got, want) -> jax.Array:
    """The largest relative l2 error of a gradient, or of a block of 128 rows; 1 if a result that should be
    zero is not."""
    cut = lambda y: y.astype(jnp.float32).reshape((EXPERTS if case.wgrad else groups.expert.size),
                                                  -1)  # noqa: E731
    error, norm = (jnp.linalg.norm(y, axis=1) for y in (cut(got) - cut(want), cut(want)))
    return jnp.max(jnp.where(norm > 0, error / norm, jnp.where(error == 0, 0.0, 1.0)))


def yardsticks(case: Case, groups: api.Groups, plain: tuple, codes: tuple) -> Runs:
    shipped = "transposed_ragged_dot_mgpu bf16" if case.wgrad else "ragged_dot_mgpu bf16"
    return available({
        shipped: lambda: ragged(case, groups, *plain),
        "DeepGEMM grouped": lambda: deep_gemm(case, groups, codes),
    }, f"{case}: ")


def available(makes: dict[str, Callable[[], Any]], case: str = "") -> dict[str, Any]:
    """The yardsticks that can be made. Prints those that cannot."""
    found = {}
    for name, make in makes.items():
        try:
            found[name] = make()
            jax.block_until_ready([f(0) for f in jax.tree.leaves(found[name]) if callable(f)])
        except (ImportError, RuntimeError, NotImplementedError, AttributeError, ValueError, AssertionError,
                TypeError) as e:
            found.pop(name, None)
            print(f"{case}no {name}: {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
    return found


def ragged(case: Case, groups: api.Groups, x, other) -> Callable[[int], object]:
    """The fastest of the shipped kernel's configurations."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    def run(a, b, sizes, tiles):
        options = dict(zip(("block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n"), tiles),
                       group_sizes=sizes)
        return transposed_ragged_dot(a, b, **options) if case.wgrad else ragged_dot(
            a, b, transpose_rhs=True, **options)

    configurations = WEIGHT_TILES if case.wgrad else FORWARD_TILES
    operands = (*((other, x) if case.wgrad else (x, other)), groups.sizes)
    programs = compiled([jax.jit(functools.partial(run, tiles=tiles)).lower(*operands)
                         for tiles in configurations])
    runs = {tiles: lambda i, f=f: f(*operands) for tiles, f in zip(configurations, programs)}
    times = measure(runs, 2)
    best = min(times, key=times.get)
    print(f"{case}: shipped kernel:", *(f"{t} {case.flops / s / 1e12:.0f}" for t, s in times.items()),
          flush=True)
    return runs[best]


def deep_gemm(case: Case, groups: api.Groups, codes: tuple) -> Callable[[int], object]:
    import torch
    import vllm.third_party.deep_gemm as library

    if case.wgrad:
        raise NotImplementedError(
            "its product grouped along the contraction needs a separate operand for each group")
    a, sa, b, sb = (torch.from_dlpack(c) for c in codes)
    expert = jnp.where(groups.expert < EXPERTS, groups.expert, -1)
    of_row = torch.from_dlpack(jnp.repeat(expert, 128))
    out = torch.empty(a.shape[0], case.n, dtype=torch.bfloat16, device="cuda")

    def run(i: int):
        library.m_grouped_fp8_gemm_nt_contiguous((a, sa.t()), (b, sb), out, of_row, disable_ue8m0_cast=True)
        return out

    return run


def dense_product(case: Case, codes: tuple) -> Callable[[int], object]:
    """A single product with as many operations, with the padding cut off."""
    a, sa, b, sb = codes
    if case.wgrad:
        operands = a[:, :ROWS], sa[: ROWS // 128], b[:, :ROWS], sb[: ROWS // 128]
        f = jax.jit(lambda a, sa, b, sb: dense.wgrad(a, sa.T, b, sb.T, backend="pallas"))
    else:
        operands = a[:ROWS], sa[:, :ROWS], b[0], sb[0]
        f = jax.jit(lambda a, sa, b, sb: dense.blockwise_matmul(a, sa.T, b, sb, backend="pallas"))
    return lambda i: f(*operands)


if __name__ == "__main__":
    main()
