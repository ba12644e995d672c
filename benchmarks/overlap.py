"""The overlap with the tensor cores: clocks of FP8 products and of the arithmetic that promotes them, in
isolation.

    jaxfp8rl bench overlap

One, two or three warpgroups on every multiprocessor run a loop. Each iteration has a product of 64 x 128 x
128, which is 256 clocks of the tensor cores, and a promotion or a part of one, after the product or beside
it. Nothing is copied, stored or waited for. The ratio is the best possible share of clocks in which the
tensor cores compute, in a kernel of such consumers. docs/notebook_kernels.md draws the conclusions;
benchmarks/gemm.py times the kernels.

Needs a Hopper GPU.
"""

from __future__ import annotations

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from benchmarks.common import arguments, row, write
from pallas_kernels import tensor_cores
from pallas_kernels.plgpu_compat import COLUMN, ROW, SMS, WGMMA, plgpu, spread, swizzled

F32, FP8 = jnp.float32, jnp.float8_e4m3fn
ROWS, COLUMNS, SLAB = 64, 128, 32
PRODUCT = 256  # clocks of a product of 64 x 128 x 128
TURNS = 256
THREADS = plgpu.Layout.WG_STRIDED((128,), 1)  # one number per thread
After = Literal["nothing", "multiply-adds", "multiplications and multiply-adds", "reads and multiply-adds",
                "all of wgrad's"]
Beside = Literal["nothing", "64 multiply-adds", "128 multiply-adds", "wgrad's reads"]


class Case(NamedTuple):
    """The work of each warpgroup, per thread: 64 multiply-adds promote a product of fprop; wgrad adds 64
    multiplications of scales, and 16 reads of two scales from shared memory."""

    warpgroups: int
    after: After = "nothing"
    beside: Beside = "nothing"
    apart: int = 0  # nanoseconds between the starts of two warpgroups

    def __str__(self) -> str:
        begin = f", begun {self.apart} ns apart" if self.apart else ""
        return f"{self.warpgroups} of them{begin}, after a product: {self.after}, beside it: {self.beside}"


CASES = [
    *(Case(n, beside=b) for b in ("64 multiply-adds", "128 multiply-adds") for n in (1, 2, 3)),
    *(Case(n, after=a) for a in get_args(After)[1:] for n in (1, 2, 3)),
    *(Case(2, "multiply-adds", apart=ns) for ns in (100, 200, 300)),
    *(Case(n, "all of wgrad's", apart=200) for n in (2, 3)),
    *(Case(n, "all of wgrad's", "wgrad's reads") for n in (1, 2)),
]


def main() -> None:
    args = arguments(__doc__, "overlap").parse_args()
    with ThreadPoolExecutor() as threads:
        programs = dict(zip(CASES, threads.map(lambda case: lowered(case).compile(), CASES)))
    rows = []
    for case, program in programs.items():
        jax.block_until_ready(program())
        slowest = np.asarray(program()[0])[..., 0].max(axis=1) / TURNS  # warpgroup, of every multiprocessor
        for metric, clocks in zip(("a turn", "of it from a product's issue to its end"),
                                  np.median(slowest, axis=0)):
            rows.append(row(str(case), metric, "clocks", float(clocks), PRODUCT * case.warpgroups,
                            "the tensor cores' own", True))
    write(args.out, "overlap", rows, args.plot)


def lowered(case: Case) -> jax.stages.Lowered:
    """A program lowered for CUDA, on any machine. It has no arguments. Its first result holds, for every
    multiprocessor, warpgroup and thread, the clocks of all iterations and those from a product's issue to its
    end."""
    each = SMS, case.warpgroups
    memory = dict(
        a=plgpu.SMEM((case.warpgroups, ROWS, 128), FP8, transforms=swizzled(FP8)),
        b=plgpu.SMEM((COLUMNS, 128), FP8, transforms=swizzled(FP8)),
        row_scales=plgpu.SMEM((ROWS,), F32), column_scales=plgpu.SMEM((COLUMNS,), F32),
    )
    program = plgpu.kernel(
        functools.partial(_kernel, case), grid=(SMS,), grid_names=("block",), num_threads=case.warpgroups,
        thread_name="wg",
        out_type=(jax.ShapeDtypeStruct((*each, 2, 128), jnp.int32), jax.ShapeDtypeStruct((*each, ROWS), F32)),
        scratch_types=memory,
    )
    return jax.jit(program).trace().lower(lowering_platforms=("cuda",))


def _kernel(case: Case, clocks, kept, *, a, b, row_scales, column_scales) -> None:
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    find = lambda s: plgpu.load(column_scales.at[pl.ds(s * SLAB, SLAB)], layout=COLUMN, optimized=False)
    matrix = lambda width: plgpu.layout_cast(jnp.zeros((ROWS, width), F32), WGMMA)
    slabs = range(COLUMNS // SLAB)
    by_row, first = plgpu.load(row_scales, layout=ROW, optimized=False), find(0)
    of_rows, of_columns = (functools.partial(spread, shape=(ROWS, SLAB), axis=axis) for axis in (0, 1))
    at_a, at_b = tensor_cores.describe(a.at[wg], b)

    def promoted(s: int, part: Array, read: list[Array]) -> Array:
        """The increment of this slab."""
        if case.after == "multiply-adds":
            return part * of_rows(by_row)
        if case.after == "multiplications and multiply-adds":
            return (part * of_rows(by_row)) * of_columns(first)
        by_column = of_columns(read[s] if read else find(s))
        return part * (by_column if case.after == "reads and multiply-adds" else of_rows(by_row) * by_column)

    def turn(_, state):
        old, total, waited = state
        partial = tensor_cores.multiply_over(old, at_a, at_b, (FP8, FP8))
        issued = _clock()  # ptxas moves nothing from below between the product's instructions
        for times in range({"64 multiply-adds": 1, "128 multiply-adds": 2}.get(case.beside, 0)):
            total = [t * of_rows(by_row) + (0.25 + times) for t in total]
        read = [find(s) for s in slabs] if case.beside == "wgrad's reads" else []
        plgpu.wgmma_wait(0)
        waited += _clock() - issued
        if case.after != "nothing":
            total = [t + promoted(s, partial[:, s * SLAB : (s + 1) * SLAB], read)
                     for s, t in zip(slabs, total)]
        return partial, tuple(total), waited

    if case.apart:
        _sleep(wg * case.apart)
    start = _clock()
    begin = matrix(COLUMNS), tuple(matrix(SLAB)
                                   for _ in slabs), plgpu.layout_cast(jnp.zeros(128, jnp.int32), THREADS)
    partial, total, waited = lax.fori_loop(0, TURNS, turn, begin)
    clocks[block, wg, 0], clocks[block, wg, 1] = _clock() - start, waited
    kept[block, wg] = sum(jnp.sum(x, axis=1) for x in (*total, partial))


def _clock() -> Array:
    """The multiprocessor's clock, as each thread reads it."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=THREADS))
    def read(ctx):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        now = llvm.inline_asm(i32, [], "mov.u32 $0, %clock;", "=r", has_side_effects=True)
        vector = llvm.UndefOp(ir.VectorType.get((1,), i32)).result
        vector = llvm.insertelement(vector, now, llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, 0)).result)
        registers = np.array([vector], object)
        return fragmented_array.FragmentedArray(_registers=registers, _layout=THREADS.to_mgpu(),
                                                _is_signed=True)

    return read()


def _sleep(nanoseconds: Array) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def sleep(ctx, time):
        del ctx
        word = time.registers.item()
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [word], "nanosleep.u32 $0;", "r", has_side_effects=True)

    sleep(nanoseconds)


if __name__ == "__main__":
    main()
