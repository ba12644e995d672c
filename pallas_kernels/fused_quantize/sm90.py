"""RMSNorm, SwiGLU and its backward pass as producers of FP8 codes on Hopper, in one pass over their inputs.

A tile is computed in registers from its input tiles and quantised by rows from there. It is then written to
shared memory in bfloat16, in place of an input, to be quantised along the tokens and copied out. The rest is
`quantize.sm90`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.plgpu_compat import spread
from pallas_kernels.quantize.sm90 import F32, Format, Plan, fused_multiply_add, quantize_made


def rms_norm(
    x: Array, inverse: Array, weight: Array, residual: Array | None, rows: Format, tokens: Format | None,
    keep: bool,
    interpret=None,
):
    """x [T, D] bfloat16 or float32, inverse [T] float32 (1 / rms), weight [D] float32, residual [T, D]
    bfloat16 or None -> (rows, tokens, kept). `kept` has the norm [T, D] bfloat16 if `keep`, and x + residual
    [T, D] bfloat16 if there is a residual."""
    arrays = (x,) if residual is None else (x, residual)
    t, d = x.shape
    plan = Plan(
        t, d, rows, tokens, fused_multiply_add(interpret),
        reads=tuple((i, 0) for i in range(len(arrays))), vectors=(0, 1),
        make=_normed, keep=(0,) * keep + (1,) * (len(arrays) - 1),
    )
    return quantize_made(plan, arrays, (inverse, weight), interpret)


def _normed(values: list[Array], vectors: list[Array]) -> list[Array]:
    x, *residual = values
    total = x.astype(jnp.bfloat16).astype(F32) + residual[0].astype(F32) if residual else x.astype(F32)
    inverse, weight = (spread(v, x.shape, axis) for axis, v in enumerate(vectors))
    normed = (total * inverse).astype(jnp.bfloat16).astype(F32) * weight
    return [normed.astype(jnp.bfloat16), total]


def swiglu(
    gate_up: Array, rows: Format | None, tokens: Format | None = None, keep: bool = False,
    square: bool = False, interpret=None
):
    """gate_up [T, 2F] bfloat16 -> (rows, tokens, [silu(gate) * up [T, F] bfloat16 if `keep`]); `square` as in
    `quantize.sm90`."""
    t, f = gate_up.shape[0], gate_up.shape[1] // 2
    fused = fused_multiply_add(interpret)
    plan = Plan(t, f, rows, tokens, fused, reads=((0, 0), (0, f)), make=_swiglu, keep=(0,) * keep,
                square=square)
    return quantize_made(plan, (gate_up,), interpret=interpret)


def _swiglu(values: list[Array], _: list[Array]) -> list[Array]:
    gate, up = (v.astype(F32) for v in values)
    return [gate * jax.nn.sigmoid(gate) * up]


def swiglu_grad(d_h: Array, gate_up: Array, fmt: Format, interpret=None):
    """d_h [T, F] bfloat16 or float32, gate_up [T, 2F] bfloat16 -> (rows, tokens, []) of d_gate_up [T, 2F]."""
    t, f = d_h.shape
    fused = fused_multiply_add(interpret)
    # bfloat16 tiles take 96 KiB; with one buffer, two blocks share a multiprocessor
    reads = (0, 0), (0, f), (1, 0)
    plan = Plan(t, f, fmt, fmt, fused, reads=reads, make=_swiglu_grad, rounded=True, parts=2, buffers=1)
    return quantize_made(plan, (gate_up, d_h), interpret=interpret)


def _swiglu_grad(values: list[Array], _: list[Array]) -> list[Array]:
    gate, up, d_h = (v.astype(F32) for v in values)
    s = jax.nn.sigmoid(gate)
    d_silu = d_h * up
    d_gate = d_silu * s + d_silu * gate * (1 - s) * s
    return [d_gate.astype(jnp.bfloat16), (d_h * (gate * s)).astype(jnp.bfloat16)]
