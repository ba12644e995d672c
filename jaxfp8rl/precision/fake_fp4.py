"""Emulations of training in FP4, for the laboratory: numbers are rounded to a format and stay float32.

**Nothing here computes in FP4, saves memory or time, or is used by a run.** `jaxfp8rl bench fp4_recipes`
trains a small language model with it. An argument `key` rounds stochastically; None, to the nearest, ties to
even.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (OCP Microscaling Formats v1.0, section 5.3.3).
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.linalg import hadamard

from pallas_kernels.four_bits import E2M1_MAX, LARGEST
from pallas_kernels.quantize.reference import E4M3, E4M3_MAX

Key = Array | None
TINY = 2.0**-100  # an amax of 0 counts as this


def e2m1(x: Array, key: Key = None) -> Array:
    """x [...] float32 -> E2M1 numbers; magnitudes above 6 become 6. With a key the upper neighbour is taken
    with the probability of the distance to the lower one, so that the mean is x where |x| <= 6."""
    a = jnp.abs(x)
    step = jnp.where(a < 2, 0.5, jnp.where(a < 4, 1.0, 2.0))
    steps = a * jnp.where(a < 2, 2.0, jnp.where(a < 4, 1.0, 0.5))
    near = jnp.round(steps) if key is None else jnp.floor(steps + jax.random.uniform(key, x.shape))
    return jnp.copysign(jnp.minimum(near * step, E2M1_MAX), x)


def e4m3(x: Array) -> Array:
    """x [...] float32 -> the nearest E4M3 numbers, float32; magnitudes above 448 become 448."""
    codes = jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(E4M3)
    return jax.lax.optimization_barrier(codes).astype(jnp.float32)


def _blocks(x: Array, block: tuple[int, int]) -> tuple[Array, tuple[int, int]]:
    """x [M, K] as [M/m, m, K/k, k], and the axes of a block."""
    (m, k), (rows, columns) = block, x.shape
    if rows % m or columns % k:
        raise ValueError(f"blocks of {m}x{k} do not divide {rows}x{columns}")
    return x.reshape(rows // m, m, columns // k, k), (1, 3)


def nvfp4(x: Array, block: tuple[int, int] = (1, 16), key: Key = None, tensor_scale: bool = True) -> Array:
    """x [M, K] in NVFP4: E2M1 with an E4M3 scale a block and a float32 scale a tensor ("Pretraining LLMs with
    NVFP4", arXiv 2509.25149, section 2 and appendix B). Blocks are 1x16, of weights 16x16. Without
    `tensor_scale` the blocks' scales have the range of E4M3 alone."""
    blocks, axes = _blocks(x, block)
    amax = jnp.max(jnp.abs(blocks), axes, keepdims=True)
    encode = LARGEST / jnp.maximum(jnp.max(amax), TINY) if tensor_scale else jnp.float32(1)
    scale = e4m3(amax / E2M1_MAX * encode)
    by = jnp.where(scale > 0, encode / jnp.where(scale > 0, scale, 1), 0.0)
    return (e2m1(blocks * by, key) * scale / encode).reshape(x.shape)


def power_of_two(x: Array, rounding: Literal["up", "down"]) -> Array:
    """The power of two next to x > 0."""
    mantissa, exponent = jnp.frexp(x)  # x = mantissa 2^exponent, mantissa in [0.5, 1)
    return jnp.ldexp(jnp.float32(1), exponent - jnp.where((mantissa == 0.5) | (rounding == "down"), 1, 0))


def _mx_scale(blocks: Array, axes: tuple[int, int], rounding: Literal["up", "down", "none"]) -> Array:
    ideal = jnp.maximum(jnp.max(jnp.abs(blocks), axes, keepdims=True), TINY) / E2M1_MAX
    if rounding == "down":  # OCP's: 2^floor(log2 amax) - 2
        return power_of_two(ideal * (E2M1_MAX / 4), "down")
    return ideal if rounding == "none" else power_of_two(ideal, "up")


def mxfp4(x: Array, block: tuple[int, int] = (1, 32), key: Key = None,
          scale: Literal["up", "down", "none"] = "up") -> Array:
    """x [M, K] in MXFP4: E2M1 with a power of two a block: amax / 6 rounded up, so that nothing is clipped
    (arXiv 2605.20402), or OCP's, which clips; "none": amax / 6 itself."""
    blocks, axes = _blocks(x, block)
    s = _mx_scale(blocks, axes, scale)
    return (s * e2m1(blocks / s, key)).reshape(x.shape)


class Decomposition(NamedTuple):
    """The error of MXFP4, [M, K] each; their sum is mxfp4(x) - x."""

    scale: Array  # Q_s - Q_s*: of rounding the scale s* = amax / 6 up to a power of two
    dead: Array  # Q_s* - x where |x| < amax / 24, which becomes 0
    grid: Array  # Q_s* - x elsewhere


def decomposed(x: Array, block: tuple[int, int] = (1, 32)) -> Decomposition:
    """Of arXiv 2605.20402. `dead` is orthogonal to the other two, element by element."""
    ideal, (blocks, axes) = mxfp4(x, block, scale="none"), _blocks(x, block)
    amax = jnp.broadcast_to(jnp.max(jnp.abs(blocks), axes, keepdims=True), blocks.shape).reshape(x.shape)
    dead = jnp.abs(x) < amax / 24
    return Decomposition(mxfp4(x, block) - ideal, jnp.where(dead, ideal - x, 0),
                         jnp.where(dead, 0, ideal - x))


def with_macro_scale(x: Array, key: Key = None, macro: int = 128) -> Array:
    """x [M, K] in MXFP4 with macro block scaling (2605.20402, MBS): of each 128 numbers, or of a row that has
    fewer, the factor 1 + m, m in [0, 1) of 8 bits, makes the ideal scale of the largest a power of two:
    Q((1 + m) x) / (1 + m)."""
    blocks, axes = _blocks(x, (1, min(macro, x.shape[-1])))
    ideal = _mx_scale(blocks, axes, "none")
    factor = 1 + jnp.floor((power_of_two(ideal, "up") / ideal - 1) * 256) / 256
    return (mxfp4((blocks * factor).reshape(x.shape),
                  key=key).reshape(blocks.shape) / factor).reshape(x.shape)


def with_residual(x: Array, quantize: Any = mxfp4, alpha: float = 0.5) -> Array:
    """x [M, K] as Q(x) + alpha Q(x - Q(x)): overflow fix (2605.20402, OF), a second product of four bits."""
    once = quantize(x)
    return once + alpha * quantize(x - once)


HADAMARD = 16


def hadamard_signs(seed: int = 0) -> np.ndarray:
    """The random signs [16] of a run: one vector for all tensors (2509.25149, appendix C)."""
    return np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), HADAMARD)


def rotated(x: Array, signs: np.ndarray) -> Array:
    """x [M, K] times a random Hadamard matrix in each 16 of K: x D H / 4. Both inputs of a product that are
    rotated along its contraction leave it as it was: (A D H)(B D H)^T / 16 = A B^T."""
    matrix = signs[:, None] * hadamard(HADAMARD).astype(np.float32) / np.float32(HADAMARD**0.5)
    return (x.reshape(*x.shape[:-1], -1, HADAMARD) @ matrix).reshape(x.shape)


class Fp4Recipe(NamedTuple):
    """Which of the three products of a linear y = x W^T has which inputs in four bits.

    form: "nvfp4" (2509.25149), or "mxfp4". square: weights in blocks of 16x16, so that W and W^T are the same
    numbers in forward and dgrad; else 1x16 along each contraction. rotate: wgrad's inputs are rotated along
    the tokens. stochastic: gradients are rounded stochastically. macro, residual: MXFP4's fixes, of all
    inputs.
    """

    form: Literal["nvfp4", "mxfp4"] = "nvfp4"
    square: bool = True
    rotate: bool = True
    stochastic: bool = True
    tensor_scale: bool = True
    macro: bool = False
    residual: bool = False


def fake(x: Array, recipe: Fp4Recipe, key: Key = None, weight: bool = False) -> Array:
    """x [M, K], to be contracted over K, as the recipe rounds it."""
    if recipe.form == "nvfp4":
        return nvfp4(x, (16, 16) if weight and recipe.square else (1, 16), key, recipe.tensor_scale)
    one = functools.partial(with_macro_scale if recipe.macro else mxfp4, key=key)
    return with_residual(x, one) if recipe.residual else one(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp4_linear(recipe: Fp4Recipe, x: Array, w: Array, key: Array) -> Array:
    """y [T, N] = x [T, K] W [N, K]^T, all three products with emulated four-bit inputs, float32.
    Straight-through: a rounding has the derivative 1. key: of stochastic rounding, one for each call."""
    return fake(x, recipe) @ fake(w, recipe, weight=True).T


def _forward(recipe: Fp4Recipe, x: Array, w: Array, key: Array) -> Any:
    wq = fake(w, recipe, weight=True)
    # the weight of dgrad is contracted over N: with square blocks it is the forward's
    same = recipe.form == "nvfp4" and recipe.square
    return fake(x, recipe) @ wq.T, (x, wq if same else fake(w.T, recipe, weight=True).T, key)


def _backward(recipe: Fp4Recipe, saved: Any, dy: Array) -> Any:
    x, w, key = saved
    of_dgrad, of_wgrad = jax.random.split(key) if recipe.stochastic else (None, None)
    turn = functools.partial(rotated, signs=hadamard_signs()) if recipe.rotate else lambda a: a
    dx = fake(dy, recipe, of_dgrad) @ w
    dw = fake(turn(dy.T), recipe, of_wgrad) @ fake(turn(x.T), recipe).T
    return dx, dw, None


fp4_linear.defvjp(_forward, _backward)


def dge_factor(x: Array, k: float = 5.0, cap: float = 3.0) -> Array:
    """The derivative that 2501.17116 gives to rounding x [...] to E2M1 (differentiable gradient estimator,
    equation 8): in a bin of width d from its lower end l, |2 (x - l) / d - 1|^(1/k - 1) / k, at most `cap`; 0
    beyond 6."""
    a = jnp.abs(x)
    d = jnp.where(a < 2, 0.5, jnp.where(a < 4, 1.0, 2.0))
    u = jnp.abs(2 * (a / d - jnp.floor(a / d)) - 1)
    return jnp.where(a > E2M1_MAX, 0.0, jnp.minimum(jnp.maximum(u, 1e-12) ** (1 / k - 1) / k, cap))


def by_row(x: Array, power: bool = False) -> tuple[Array, Array]:
    """x [M, K] in E2M1 with one scale a row, amax / 6 (2501.17116, section 3) -> (rounded, scale [M, 1])."""
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True), TINY) / E2M1_MAX
    return scale * e2m1(x / scale), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def dge_linear(dge: bool, quantile: float | None, compensate: bool, x: Array, w: Array) -> Array:
    """y [T, N] = x [T, K] W [N, K]^T with both in E2M1, a scale a token and an output channel (2501.17116).

    dge: the weight's gradient is multiplied by `dge_factor`, else straight through. quantile: activations are
    clamped to the two-sided quantile of each eighth row, 0.99 there (outlier clamping); what is cut off is
    multiplied in high precision if `compensate`. The backward pass is in float32 (theirs: FP8).
    """
    return _dge_forward(dge, quantile, compensate, x, w)[0]


def _dge_forward(dge: bool, quantile: float | None, compensate: bool, x: Array, w: Array) -> Any:
    clamped = x
    if quantile is not None:
        # to sort all takes longer than the rest
        low, high = jnp.quantile(x[::8], jnp.float32([1 - quantile, quantile]))
        clamped = jnp.clip(x, low, high)
    xq, (wq, scale) = by_row(clamped)[0], by_row(w)
    xq = xq + (x - clamped) if compensate else xq
    return xq @ wq.T, (xq, wq, w / scale)


def _dge_backward(dge: bool, quantile: float | None, compensate: bool, saved: Any, dy: Array) -> Any:
    xq, wq, scaled = saved
    dw = dy.T @ xq
    return dy @ wq, dw * dge_factor(scaled) if dge else dw


dge_linear.defvjp(_dge_forward, _dge_backward)
