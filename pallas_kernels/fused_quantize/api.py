"""RMSNorm, SwiGLU and its backward pass with FP8 codes as output, by the Hopper kernels or by reference.py:
one explicit choice.

`backend` is that of `quantize.api`. Codes and scales equal the reference's bit for bit if the activations do.
Those of SwiGLU always do. About 1e-6 of the norms differ, because their sum of squares may be added in
another order, and so may SwiGLU's gradients, where a compiler fuses other products with sums.

Widths are multiples of 128, as in every FP8 product that an engine fuses; tokens are padded to the multiples
that the kernels need.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.forward_only import forward_only
from pallas_kernels.fused_quantize import reference, sm90
from pallas_kernels.fused_quantize.reference import Quantized
from pallas_kernels.plgpu_compat import Backend, pad_to, use_kernel
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import AMAX_FLOOR, E4M3, E5M2, FUSED_AMAX_FLOOR
from pallas_kernels.quantize.sm90 import Format

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FUSED, PLAIN = Format(E4M3, False, FUSED_AMAX_FLOOR), Format(E4M3, False, AMAX_FLOOR)
no_derivative = forward_only(
    "differentiate jaxfp8rl.models.layers.rms_norm or swiglu and then jaxfp8rl.precision.linear.linear, or "
    "jaxfp8rl.precision.mlp.swiglu_mlp"
)


@no_derivative
def rms_norm_quantize(
    x: Array, weight: Array, eps: float, residual: Array | None = None, *, tokens: bool = False,
    keep: bool = False,
    backend: Backend = "auto", interpret=None,
) -> tuple[Quantized, Array | None]:
    """The RMS norm of x [T, D] (bfloat16 or float32) plus `residual` [T, D] bfloat16, times weight [D], as
    codes by rows.

    tokens: also as codes by tokens, for wgrad. keep: also in bfloat16. The second result is the sum in
    bfloat16, the next residual stream; None without a residual. The rows' statistics take a separate pass
    over x.
    """
    _check("x", x, (BF16, F32), 1)
    if weight.shape != x.shape[1:]:
        raise ValueError(
            f"weight {weight.shape} of x {x.shape}: expected one number for each of the {x.shape[1]} columns")
    if residual is not None and (residual.shape != x.shape or residual.dtype != BF16):
        raise ValueError(f"residual {residual.shape} {residual.dtype}: expected {x.shape} bfloat16, "
                         f"the shape of x")
    if not use_kernel(backend):
        return reference.rms_norm_quantize(x, weight, eps, residual, tokens=tokens, keep=keep)
    t, inverse = x.shape[0], reference.inverse_rms(reference.residual_sum(x, residual), eps)[:, 0]
    x, residual = _padded(x, tokens), None if residual is None else _padded(residual, tokens)
    # 0 for padded rows: with eps = 0 their inverse would be infinite, and 0 times infinity NaN
    inverse = jnp.pad(inverse, (0, len(x) - t))
    rows, by_tokens, kept = sm90.rms_norm(
        x, inverse, reference.round_bf16(weight), residual, FUSED, PLAIN if tokens else None, keep, interpret
    )
    total = None if residual is None else kept.pop()[:t]
    return _cut(t, rows, by_tokens, kept), total


@no_derivative
def swiglu_quantize(
    gate_up: Array, *, rows: bool = True, tokens: bool = False, keep: bool = False, square: bool = False,
    backend: Backend = "auto", interpret=None,
) -> Quantized:
    """silu(gate) * up of gate_up [T, 2F] bfloat16, as codes [T, F] by rows, by tokens or both. `keep` as in
    `rms_norm_quantize`, `square` as in `quantize_tokens`."""
    _check("gate_up", gate_up, (BF16,), 2)
    if not (rows or tokens):
        raise ValueError("swiglu_quantize with neither rows nor tokens: ask for one of them")
    if not use_kernel(backend):
        return reference.swiglu_quantize(gate_up, rows=rows, tokens=tokens, keep=keep, square=square)
    formats = FUSED if rows else None, PLAIN if tokens else None
    made = _cut(gate_up.shape[0], *sm90.swiglu(_padded(gate_up, tokens), *formats, keep, square, interpret))
    if made.tokens is None or not square:
        return made
    codes, scale = made.tokens
    return made._replace(tokens=(codes, scale[::BLOCK]))


@no_derivative
def swiglu_grad_quantize(
    d_h: Array, gate_up: Array, dtype: jnp.dtype = E4M3, *, backend: Backend = "auto", interpret=None
) -> Quantized:
    """d_gate_up as codes by rows [T, 2F], for dgrad, and by tokens [2F, T], for wgrad, in `dtype`.

    d_h [T, F] bfloat16 or float32 is the cotangent of silu(gate) * up, gate_up [T, 2F] bfloat16.
    """
    _check("gate_up", gate_up, (BF16,), 2)
    _check("d_h", d_h, (BF16, F32), 1)
    if (d_h.shape[0], 2 * d_h.shape[1]) != gate_up.shape:
        raise ValueError(f"d_h {d_h.shape} of gate_up {gate_up.shape}: expected half its width")
    if jnp.dtype(dtype) not in (E4M3, E5M2):
        raise ValueError(f"codes of type {jnp.dtype(dtype)}: float8_e4m3fn or float8_e5m2")
    if not use_kernel(backend):
        return reference.swiglu_grad_quantize(d_h, gate_up, dtype)
    fmt = Format(jnp.dtype(dtype), False, AMAX_FLOOR)
    return _cut(d_h.shape[0], *sm90.swiglu_grad(_padded(d_h, True), _padded(gate_up, True), fmt, interpret))


def _check(name: str, x: Array, dtypes: tuple, parts: int) -> None:
    if x.dtype not in dtypes:
        raise ValueError(f"{name} {x.shape} is {x.dtype}: expected {' or '.join(map(str, dtypes))}")
    if x.ndim != 2 or not x.size or x.shape[1] % (parts * BLOCK):
        raise ValueError(f"{name} {x.shape}: expected [tokens, a multiple of {parts * BLOCK}]")


def _padded(x: Array, tokens: bool) -> Array:
    return pad_to(x, BLOCK if tokens else 8, BLOCK)


def _cut(t: int, rows, tokens, kept: list[Array]) -> Quantized:
    """The results without the padded tokens, scales transposed to [T, K/128]."""
    by_rows, by_tokens = rows and (rows[0][:t], rows[1][:, :t].T), tokens and (tokens[0][:, :t], tokens[1].T)
    return Quantized(by_rows, by_tokens, kept[0][:t] if kept else None)
