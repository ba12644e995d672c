"""Tensor-core products with nothing left to compute between the end of one and the start of the next.

Pallas's own `wgmma` computes the addresses of its operands right before the first instruction, which leaves
the tensor cores idle for some 30 clocks. Here the addresses are a value that is computed in advance and
carried through a loop. Pallas's accumulators also begin as zeros, new values each time. The compiler may then
start a product in new registers while the last one is still being read, and a kernel that needs nearly all
registers spills. Here the registers of the previous product are operands of the first instruction, which
ignores their contents.

It uses private parts of JAX, as they are in 0.11.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.plgpu_compat import WGMMA, plgpu, swizzled

# imported by name, because the package has a function of the same name
library = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")

ROWS, DEPTH, BLOCK = 64, 32, 128  # rows and depth of one instruction; the contraction of a product
UNIT = 16  # the unit of a descriptor's addresses, in bytes
TYPES = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}
SCALAR = plgpu.Layout.WG_SPLAT


class Descriptor(NamedTuple):
    """The matrix descriptor of FP8 codes in shared memory, rows of 128: two words of 32 bits (PTX ISA,
    "matrix descriptor format")."""

    low: Array  # int32; its lowest bits are the start address
    high: Array  # the layout

    def moved(self, rows: Array | int) -> Descriptor:
        """The descriptor of the matrix that begins this many rows further on."""
        return self._replace(low=self.low + rows * (BLOCK // UNIT))


def describe(a, b) -> tuple[Descriptor, Descriptor]:
    """The descriptors of a [64, 128] and b [N, 128], FP8 codes in shared memory as `swizzled`."""
    codes = tuple(plgpu.RefType(swizzled(x.dtype)) for x in (a, b))
    word = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=codes, return_type=(word,) * 4)
    def words(ctx, a_memory, b_memory):
        del ctx
        return [_splat(half) for x in _descriptors(a_memory, b_memory, b.shape[0]) for half in _halves(x)]

    found = words(a, b)  # pyright: ignore[reportCallIssue]  # the decorator passes `ctx`
    return Descriptor(*found[:2]), Descriptor(*found[2:])


def multiply_over(old: Array, a: Descriptor, b: Descriptor, dtypes: tuple[jnp.dtype, jnp.dtype]) -> Array:
    """Start a b^T, a [64, 128] and b [N, 128] of FP8 `dtypes`, in the registers of `old` [64, N] float32.

    Returns those registers, which may be read only after `plgpu.wgmma_wait(0)`.
    """
    width, kind = old.shape[1], ".".join(TYPES[jnp.dtype(t)] for t in dtypes)
    result = plgpu.ShapeDtypeStruct((ROWS, width), jnp.float32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, *[SCALAR] * 4), return_type=result)
    def issue(ctx, old, *words):
        del ctx
        registers = library.WGMMAAccumulator.from_registers(old)._value  # fenced
        values, words = list(registers.registers.flat), [word.registers.item() for word in words]
        for step in range(BLOCK // DEPTH):
            values = _instruct(values, words, f"m{ROWS}n{width}k{DEPTH}.f32.{kind}", step)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "",
                        has_side_effects=True)
        shape = registers.registers.shape
        new = fragmented_array.FragmentedArray(
            _registers=np.array(values, object).reshape(shape), _layout=registers.layout, _is_signed=None
        )
        return new.to_layout(old.layout)

    return issue(old, *a, *b)  # pyright: ignore[reportReturnType]  # outside of it, an array


def wait_for_warps() -> None:
    """A barrier of the warpgroup's four warps: after it, all earlier reads from shared memory by any of them
    are complete."""

    @plgpu.inline_mgpu()
    def meet(ctx):
        del ctx
        utils.warpgroup_barrier()

    meet()  # pyright: ignore[reportCallIssue]  # the decorator passes `ctx`


def _descriptors(a, b, width: int) -> list[Any]:
    """The 64-bit descriptors of a and b."""
    b = utils.memref_transpose(b, (1, 0, 3, 2))
    create = functools.partial(mma_utils.create_descriptor, swizzle=128)
    (of_a, a_strides), *_ = create(a, large_tile=(ROWS, BLOCK), group_size=(ROWS, BLOCK),
                                   logical_k_major=False)
    (of_b, b_strides), *_ = create(b, large_tile=(BLOCK, BLOCK), group_size=(BLOCK, width),
                                   logical_k_major=True)
    if {a_strides[1][0], b_strides[1][0]} != {DEPTH}:
        raise NotImplementedError(
            f"the next {DEPTH} of the contraction are {a_strides[1][0]} and {b_strides[1][0]} bytes away")
    return [of_a, of_b]


def _halves(value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The low and high 32 bits of a 64-bit value."""
    i32, i64 = map(ir.IntegerType.get_signless, (32, 64))
    cut = lambda x: llvm.trunc(i32, x, llvm.IntegerOverflowFlags.none)
    return cut(value), cut(llvm.lshr(value, llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, 32)).result))


def _splat(value: ir.Value) -> fragmented_array.FragmentedArray:
    return fragmented_array.FragmentedArray.splat(value, (), is_signed=True)


def _instruct(values: list, words: list[ir.Value], shape: str, step: int) -> list:
    """Issue the instruction for 32 of the contraction. Its sums in `values`, which are added to or ignored,
    are tied to the same registers. `words`: the two words of either descriptor."""
    count, of = len(values), values[0].type
    sums = ",".join(f"${i}" for i in range(count))
    low_a, high_a, low_b, high_b = (f"${2 * count + i}" for i in range(4))
    ahead = step * DEPTH // UNIT
    text = (
        "{ .reg .pred p; .reg .b32 x, y; .reg .b64 a, b; "
        f"setp.ne.b32 p, {int(step > 0)}, 0; add.s32 x, {low_a}, {ahead}; add.s32 y, {low_b}, {ahead}; "
        f"mov.b64 a, {{x, {high_a}}}; mov.b64 b, {{y, {high_b}}}; "
        f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, a, b, p, 1, 1; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4
    packed = llvm.inline_asm(
        llvm.StructType.get_literal([of] * count), [*values, *words], text, ",".join(constraints),
        has_side_effects=True
    )
    return [llvm.extractvalue(of, packed, [i]) for i in range(count)]
