"""The parts of a decoding step, a token a row, by the Hopper kernels or by reference.py: one explicit choice.

`backend` is that of `pallas_kernels.quantize.api`. A row's results depend on that row alone, in every bit.
Kernel and reference add up a row's squares in another order; about 1e-6 of the codes differ by that.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.few_rows import reference, sm90
from pallas_kernels.few_rows.reference import Quantized
from pallas_kernels.forward_only import forward_only
from pallas_kernels.plgpu_compat import Backend, use_kernel
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import AMAX_FLOOR

WIDTH = sm90.WARPS * BLOCK  # widths are multiples of it
no_derivative = forward_only(
    "differentiate jaxfp8rl.models.layers.rms_norm or swiglu and then jaxfp8rl.precision.linear.linear")


@no_derivative
def rms_norm(x: Array, weight: Array, eps: float, *, backend: Backend = "auto", interpret=None) -> Array:
    """The RMSNorm (Zhang and Sennrich 2019) of x [T, D] times weight [D], [T, D] bfloat16, with the roundings
    of `add_norm_quantize`. Raises the same errors."""
    if weight.shape != x.shape[1:]:
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)}: [T, D] and [D]")
    _check("x", x, 1)
    _check("weight", weight, 1)
    return (sm90.rms_norm(x, weight, eps, interpret) if use_kernel(backend)
            else reference.rms_norm(x, weight, eps))


@no_derivative
def add_norm_quantize(x: Array, y: Array, weight: Array, eps: float, *, amax_floor: float = AMAX_FLOOR,
                      backend: Backend = "auto", interpret=None) -> tuple[Array, Quantized]:
    """x + y, [T, D] bfloat16, and its RMSNorm (Zhang and Sennrich 2019) times weight [D] as codes [T, D] E4M3
    and scales [D/128, T] float32.

    x, y and weight are bfloat16, D a multiple of 512. Raises ValueError, with what was found, for anything
    else, and TypeError if a derivative is computed."""
    if x.shape != y.shape or weight.shape != x.shape[1:]:
        raise ValueError(f"x {list(x.shape)}, y {list(y.shape)}, weight {list(weight.shape)}: [T, D], "
                         f"[T, D] and [D]")
    for name, a in (("x", x), ("y", y), ("weight", weight)):
        _check(name, a, 1)
    by = (sm90, (interpret,)) if use_kernel(backend) else (reference, ())
    return by[0].add_norm_quantize(x, y, weight, eps, amax_floor, *by[1])


@no_derivative
def swiglu_quantize(gate_up: Array, *, amax_floor: float = AMAX_FLOOR, backend: Backend = "auto",
                    interpret=None) -> Quantized:
    """silu(gate) * up (Shazeer 2020) of gate_up [T, 2F] bfloat16, gate and up side by side, as codes [T, F]
    E4M3 and scales [F/128, T] float32. F is a multiple of 512. Raises the same errors."""
    _check("gate_up", gate_up, 2)
    by = (sm90, (interpret,)) if use_kernel(backend) else (reference, ())
    return by[0].swiglu_quantize(gate_up, amax_floor, *by[1])


@no_derivative
def rotate_and_write(
    qkv: Array, cos: Array, sin: Array, at: Array, k_cache: Array, v_cache: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None, *, eps: float = 0.0, backend: Backend = "auto", interpret=None,
) -> tuple[Array, Array, Array]:
    """The queries [B, H, d] of qkv [B, H + 2K, d] bfloat16, and the caches [S, K, d] with its keys and values
    in the slots at [B] int32; a row whose slot is negative writes nothing.

    Queries and keys are normed by q_norm and k_norm [d], unless those are None, rounded before and after,
    then rotated by cos and sin [B, d/2] float32, pairs (i, i + d/2) (Su et al. 2021). Caches are E4M3,
    saturated, or bfloat16. The kernel takes what `rotates` says. Raises ValueError for anything else, and
    TypeError if a derivative is computed."""
    _check_heads(qkv, k_cache.shape[1], backend)
    by = (sm90, (interpret,)) if use_kernel(backend) else (reference, ())
    return by[0].rotate_and_write(qkv, cos, sin, at, k_cache, v_cache, q_norm, k_norm, eps, *by[1])


@no_derivative
def rotate(qkv: Array, cos: Array, sin: Array, key_heads: int, dtype: jnp.dtype, q_norm: Array | None = None,
           k_norm: Array | None = None, *, eps: float = 0.0, backend: Backend = "auto",
           interpret=None) -> tuple[Array, Array, Array]:
    """`rotate_and_write` into arrays of their own: the queries [B, H, d], and the keys and values [B,
    key_heads, d] as a cache of this dtype holds them."""
    _check_heads(qkv, key_heads, backend)
    if use_kernel(backend):
        return sm90.rotate(qkv, cos, sin, key_heads, dtype, q_norm, k_norm, eps, interpret)
    nothing = jnp.zeros((len(qkv), key_heads, qkv.shape[2]), dtype)
    at = jnp.arange(len(qkv), dtype=jnp.int32)
    return reference.rotate_and_write(qkv, cos, sin, at, nothing, nothing, q_norm, k_norm, eps)


def rotates(qkv: Array, heads: int, key_heads: int) -> bool:
    """Whether the kernel takes queries of so many heads, and keys and values of so many."""
    whole = heads % sm90.WARPS == key_heads % sm90.WARPS == 0
    return qkv.dtype == jnp.bfloat16 and qkv.shape[-1] == BLOCK and whole


def _check_heads(qkv: Array, K: int, backend: Backend) -> None:
    if use_kernel(backend) and not rotates(qkv, qkv.shape[1] - 2 * K, K):
        raise ValueError(f"qkv {qkv.dtype}{list(qkv.shape)}, {K} heads of keys: the kernel takes bfloat16 "
                         f"heads of 128, "
                         f'and numbers of them that are multiples of {sm90.WARPS}; backend="reference" any')


def _check(name: str, x: Array, parts: int) -> None:
    if x.dtype != jnp.bfloat16 or not x.size or x.shape[-1] % (parts * WIDTH):
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: expected bfloat16, a multiple of "
                         f"{parts * WIDTH} wide")
