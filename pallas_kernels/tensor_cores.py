"""A tensor-core product written over registers that hold an older one: what Pallas's own `wgmma` has no way to say.

Pallas's accumulators begin as zeros, new values each, and so the compiler of machine code may start a product in registers of
its own while the last one is still being read. A kernel that needs nearly all registers then spills. Here the old product's
registers are operands of the first instruction, which is told to ignore what they hold.

Made of parts of JAX that are not public, as they are in 0.11.
"""

from __future__ import annotations

import functools
import importlib

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.plgpu_compat import WGMMA, plgpu, swizzled

library = importlib.import_module("jax.experimental.mosaic.gpu.wgmma")  # the package has a function of that name

ROWS, DEPTH, BLOCK = 64, 32, 128  # of one instruction; the contraction here
TYPES = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}


def multiply_over(old: Array, a, b) -> Array:
    """Starts a b^T of FP8 codes in shared memory, a [64, 128] and b [N, 128], in the registers of `old` [64, N] float32.

    Returns those registers, which may be read only after `plgpu.wgmma_wait(0)`.
    """
    width = old.shape[1]
    codes = plgpu.RefType(swizzled(a.dtype))
    result = plgpu.ShapeDtypeStruct((ROWS, width), jnp.float32, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(WGMMA, codes, codes), return_type=result)
    def issue(ctx, old, a_memory, b_memory):
        del ctx
        registers = library.WGMMAAccumulator.from_registers(old)._value  # fenced
        descriptors = _descriptors(a_memory, b_memory, width)
        values, kind = list(registers.registers.flat), (TYPES[a.dtype], TYPES[b.dtype])
        for step in range(BLOCK // DEPTH):
            values = _instruct(values, *(_advance(d, step * stride) for d, stride in descriptors), kind, width, add=step > 0)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "wgmma.commit_group.sync.aligned;", "", has_side_effects=True)
        shape = registers.registers.shape
        new = fragmented_array.FragmentedArray(
            _registers=np.array(values, object).reshape(shape), _layout=registers.layout, _is_signed=None
        )
        return new.to_layout(old.layout)

    return issue(old, a, b)


def _descriptors(a, b, width: int) -> list[tuple[ir.Value, int]]:
    """Of a and b: where they begin in shared memory and how they lie, and 16-byte units to the next 32 of the contraction."""
    b = utils.memref_transpose(b, (1, 0, 3, 2))
    describe = functools.partial(mma_utils.create_descriptor, swizzle=128)
    (a, a_strides), *_ = describe(a, large_tile=(ROWS, BLOCK), group_size=(ROWS, BLOCK), logical_k_major=False)
    (b, b_strides), *_ = describe(b, large_tile=(BLOCK, BLOCK), group_size=(BLOCK, width), logical_k_major=True)
    return [(a, a_strides[1][0] >> 4), (b, b_strides[1][0] >> 4)]


def _advance(descriptor: ir.Value, units: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return llvm.add(descriptor, llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, units)).result, llvm.IntegerOverflowFlags.none)


def _instruct(values: list, a: ir.Value, b: ir.Value, kind: tuple[str, str], width: int, add: bool) -> list:
    """One instruction of depth 32; its sums in `values`, which are added to or ignored, are tied to the same registers."""
    count, of = len(values), values[0].type
    sums = ",".join(f"${i}" for i in range(count))
    shape = f"m{ROWS}n{width}k{DEPTH}.f32.{kind[0]}.{kind[1]}"
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(add)}, 0; "
        f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, ${2 * count}, ${2 * count + 1}, p, 1, 1; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["l", "l"]
    packed = llvm.inline_asm(
        llvm.StructType.get_literal([of] * count), [*values, a, b], text, ",".join(constraints), has_side_effects=True
    )
    return [llvm.extractvalue(of, packed, [i]) for i in range(count)]
