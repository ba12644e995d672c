"""The pieces of a decoder layer, as pure functions. Softmax, norms and RoPE compute in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxfp8rl.models.families import Activation
from jaxfp8rl.models.rope import Rope
from jaxfp8rl.precision.linear import round_to
from pallas_kernels.attention import masked
from pallas_kernels.quantize.reference import E4M3_MAX


def rms_norm(x: Array | UnfusedResidual, weight: Array, eps: float, dtype: DTypeLike | None = None,
             once: bool = False, unit_offset: bool = False) -> Array:
    """x [..., D] / rms(x) * weight [D] in `dtype`, x's own by default. Rounded to it before and after the
    weight, as Hugging Face does, or `once`, after it, as compilers do that fuse the two. With `unit_offset`
    (Gemma) the factor is 1 + weight in float32, and always rounded once."""
    whole = materialize(x)
    x32 = whole.astype(jnp.float32)
    normed, dtype = x32 * inverse_rms(x32, x, eps), dtype or whole.dtype
    if unit_offset:
        return (normed * (1 + weight.astype(jnp.float32))).astype(dtype)
    if once:
        return (normed * weight.astype(dtype).astype(jnp.float32)).astype(dtype)
    return _weighted(normed, weight, dtype)


def _weighted(normed: Array, weight: Array, dtype: DTypeLike) -> Array:
    """Their product in `dtype`, to which `normed` is rounded first."""
    return normed.astype(dtype) * weight.astype(dtype)


def inverse_rms(x32: Array, x: Array | UnfusedResidual, eps: float) -> Array:
    """[..., 1] float32 of x32 [..., D], which is `x` in float32. The sum of squares, which the derivative
    needs, is little enough to be kept for it."""
    return jax.lax.rsqrt(checkpoint_name(_sum_of_squares(x32, x), "statistics") / x32.shape[-1] + eps)


@jax.custom_vjp
@jax.named_scope("sum_of_squares")
def _sum_of_squares(x32: Array, x: Array | UnfusedResidual) -> Array:
    """In every program a kernel of its own, which reads x and writes this: fused with what else is made of x,
    or of the sum, as suits the program, XLA for GPUs adds up in another order. Score and update would differ,
    in FP8 by whole roundings."""
    x32 = materialize(jax.lax.optimization_barrier(x)).astype(jnp.float32)
    return jax.lax.optimization_barrier(jnp.sum(jnp.square(x32), axis=-1, keepdims=True))


_sum_of_squares.defvjp(lambda x32, x: (_sum_of_squares(x32, x), x32), lambda x32, g: (2 * g * x32, None))


class UnfusedResidual(NamedTuple):
    """A residual stream [..., D] as its last two parts: `x`, rounded, and what was added to it. A norm sees
    their sum unrounded; what travels on is the rounded one, made when the next part is added. Both are of one
    type, but inside a layer whose engine adds an unrounded norm: there `added` is float32."""

    x: Array
    added: Array

    @property
    def total(self) -> Array:
        return self.x.astype(jnp.float32) + self.added.astype(jnp.float32)


@jax.custom_vjp
def shared_cotangent(x: Array | UnfusedResidual) -> Array | UnfusedResidual:
    """x. Backwards what comes back for the two parts of an UnfusedResidual, of which only their sum is used,
    is the same: one of them is read."""
    return x


def _of_one(_: None, d: Array | UnfusedResidual) -> tuple[Array | UnfusedResidual]:
    return (UnfusedResidual(d.x, d.x.astype(d.added.dtype)) if isinstance(d, UnfusedResidual) else d,)


shared_cotangent.defvjp(lambda x: (x, None), _of_one)


def materialize(x: Array | UnfusedResidual) -> Array:
    """[..., D], float32 of a Stream."""
    return x.total if isinstance(x, UnfusedResidual) else x


def add_residual(x: Array | UnfusedResidual, y: Array) -> Array | UnfusedResidual:
    """x + y, of x's types."""
    if isinstance(x, UnfusedResidual):
        return UnfusedResidual(x.total.astype(x.x.dtype), y.astype(x.added.dtype))
    return x + y.astype(x.dtype)


def add_rounding_once(x: Array | UnfusedResidual, y: Array, dtype: DTypeLike) -> Array | UnfusedResidual:
    """x + y in a stream that a layer rounds once: y is attention's result where x is float32, which it rounds
    to `dtype`, and the MLP's where x is the sum with attention's, which becomes float32 again."""
    if isinstance(x, UnfusedResidual):
        return x.total + y.astype(jnp.float32)
    return UnfusedResidual(x.astype(dtype), y)


def rope_tables(positions_BT: Array, rope: Rope, head_dim: int,
                dtype: str = "float32") -> tuple[Array, Array]:
    """Cosine and sine of each position's angles, [B, T, 1, Hd/2] float32, ready to broadcast over heads;
    rounded to `dtype`, the type that the engine keeps its table in."""
    angles = positions_BT.astype(jnp.float32)[..., None, None] * rope.frequencies(head_dim)
    scaled = lambda x: x if rope.amplitude == 1 else x * np.float32(rope.amplitude)
    return round_to(scaled(jnp.cos(angles)), dtype), round_to(scaled(jnp.sin(angles)), dtype)


def apply_rope(
    x_BTHd: Array, cos: Array, sin: Array, norm: Array | None = None, eps: float = 0.0, fused: bool = False,
    unit_offset: bool = False,
) -> Array:
    """Rotate the pairs (i, i + Hd/2), Hugging Face's layout of RoPE (Su et al. 2021); before that RMSNorm
    over each head where `norm` [Hd] is its weight, rounded as `rms_norm` is; with no rounding between the two
    if `fused`. The halves are normalised apart: whole, a head would be written in float32 for both to read.
    """
    x32 = x_BTHd.astype(jnp.float32)
    a, b = jnp.split(x32, 2, axis=-1)
    if norm is not None:
        inverse = inverse_rms(x32, x_BTHd, eps)
        halves = [(half * inverse, weight) for half, weight in zip((a, b), jnp.split(norm, 2))]
        weigh = _head_norm(x_BTHd.dtype, fused, unit_offset)
        a, b = (weigh(half, weight) for half, weight in halves)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHd.dtype)


def _head_norm(dtype: DTypeLike, fused: bool, unit_offset: bool) -> Callable:
    """weigh(normed half of a head, its weight) -> float32, rounded to `dtype` where `rms_norm` does unless
    `fused`."""
    if unit_offset:
        weighted = lambda h, w: h * (1 + w.astype(jnp.float32))
        return weighted if fused else lambda h, w: weighted(h, w).astype(dtype).astype(jnp.float32)
    if fused:
        return lambda h, w: h * w.astype(jnp.float32)
    return lambda h, w: _weighted(h, w, dtype).astype(jnp.float32)


def attention_mask(segment_ids_BT: Array, window: int | None = None, ends_BT: Array | None = None) -> Array:
    """Segment ids [B, T] int32 of packed rows -> [B, T, S] bool: whether the token t sees the token s. It
    sees those of its own segment up to itself, of which at most the last `window`; with `ends_BT` those up to
    itself whose end lies behind it (TrainBatch.ends). Padding (segment 0) sees padding, so its softmax is
    never empty."""
    t = jnp.arange(segment_ids_BT.shape[1])
    seen = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & (t[:, None] >= t[None, :])
    if ends_BT is not None:
        among = (t[:, None] >= t[None, :]) & (t[:, None] < ends_BT[:, None, :])
        seen = jnp.where(segment_ids_BT[:, :, None] > 0, among, seen)
    return seen if window is None else seen & (t[:, None] - t[None, :] < window)


def attention(
    q_BTHd: Array, k_BSKd: Array, v_BSKd: Array, mask_BTS: Array, fp8: bool = False,
    q_scale: Array | float = 1.0,
    probabilities: DTypeLike | None = None, scale: float | None = None,
) -> Array:
    """Grouped-query attention -> [B, T, H, Hd] in q's dtype. Query head h reads KV head h // (H/K); none is
    repeated.

    Rounded where FlashAttention rounds (Dao et al. 2022, algorithm 1): exp(score - max) enters the product
    with the values in their type and is divided by its float32 sum afterwards. `fp8`: queries and those
    exponentials enter as E4M3, the latter times 2^8, as in FlashAttention 3 (over one block of keys; over
    several, its maximum is the running one), and queries over `q_scale`, a power of two. `probabilities`: the
    type in which exponentials enter the product, if not the values'. `scale` of the scores: d ** -0.5 if
    None.
    """
    B, T, H, d = q_BTHd.shape
    K = k_BSKd.shape[2]
    v_BSKd = v_BSKd.astype(probabilities or v_BSKd.dtype)
    # else a GPU multiplies float32 as TF32
    exact = jax.lax.Precision.HIGHEST if v_BSKd.dtype == jnp.float32 else None
    product = {"precision": exact, "preferred_element_type": jnp.float32}
    q_BTKGd = (round_scaled(q_BTHd, q_scale) if fp8 else q_BTHd).reshape(B, T, K, H // K, d)
    scores = masked.scores(q_BTKGd, k_BSKd, mask_BTS, **product) * (d**-0.5 if scale is None else scale)
    scores = jnp.where(mask_BTS[:, None, None], scores, jnp.finfo(jnp.float32).min)
    exps = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    rounded = round_e4m3(exps * 2**8) * 2**-8 if fp8 else exps
    out = masked.weighted_sum(rounded.astype(v_BSKd.dtype), v_BSKd, mask_BTS,
                              **product) / exps.sum(-1, keepdims=True)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, d).astype(q_BTHd.dtype)


def gated(gate: Array, up: Array, fused: bool = False, activation: Activation = Activation.SILU) -> Array:
    """activation(gate) * up, [..., F] (Shazeer 2020), in gate's dtype, the activation rounded to it first; in
    float32, unrounded, if `fused`."""
    active = _ACTIVATIONS[activation](gate.astype(jnp.float32))
    return active * up.astype(jnp.float32) if fused else active.astype(gate.dtype) * up


def swiglu(gate: Array, up: Array, fused: bool = False) -> Array:
    """`gated` with SiLU."""
    return gated(gate, up, fused)


_ACTIVATIONS = {Activation.SILU: jax.nn.silu,
                Activation.GELU_TANH: functools.partial(jax.nn.gelu, approximate=True)}


def to_e4m3(x: Array) -> Array:
    """Cast with saturation and scale 1: a plain cast gives NaN above 464."""
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def round_e4m3(x: Array, truncate: bool = False) -> Array:
    """x as it reads back from an FP8 KV cache, in x's dtype: the nearest E4M3 number, or the next towards
    zero if `truncate`. Straight-through: its derivative is the identity.

    By arithmetic: XLA for GPUs drops a cast to E4M3 and back as "excess precision", and the rounding with it.
    """
    return _round_e4m3(x, truncate)  # pyright: ignore[reportReturnType]  # partial hides the type


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_e4m3(x: Array, truncate: bool) -> Array:
    x = jnp.clip(x, -E4M3_MAX, E4M3_MAX)
    subnormal = (jnp.trunc if truncate else jnp.round)(x * 2.0**9) * 2.0**-9  # below 2^-6 the step is 2^-9
    # above it three bits follow the leading one
    return jnp.where(jnp.abs(x) < 2.0**-6, subnormal, _three_bits(x, truncate))


def round_scaled(x: Array, scale: Array | float, truncate: bool = False) -> Array:
    """`round_e4m3` of x / scale, times scale, in x's dtype; exact but for that rounding if scale is a power
    of two."""
    return (round_e4m3(x / jnp.asarray(scale, x.dtype), truncate)
            * jnp.asarray(scale, x.dtype)).astype(x.dtype)


def _three_bits(x: Array, truncate: bool) -> Array:
    if not truncate:
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFF00000), jnp.float32).astype(x.dtype)


@_round_e4m3.defjvp
def _(truncate, primals, tangents):
    return _round_e4m3(*primals, truncate), tangents[0]
