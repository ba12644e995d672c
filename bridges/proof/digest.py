"""A digest of a tensor's bytes that tells where each stands, computed where the tensor is, at the speed of
one reading.

A tensor [R, C] is read as little-endian 32-bit words w[r, c], rows padded with zero bytes to whole words.
With a key k(p) of the position p = r * words a row + c, and rot(x) exchanging the halves of a word,

    digest = ( sum of w * (k | 1),  sum of rot(w) * (rot(k) | 1) )    modulo 2^32, as two uint32

An odd factor is invertible modulo 2^32, so that no change of a single word can go unseen; of two unlike
tensors the digests agree by chance once in about 2^64. It finds accidents; it is no protection against
somebody who wants to forge it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

if TYPE_CHECKING:
    import torch

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# the word of float32 infinity: those of positive finite numbers lie below, of negative ones above
INFINITY = 0x7F800000
SMALL = 2**15  # words that one block of threads adds up as fast as many would
Cut = tuple[int, int, bool]


@jax.jit
def stack_digests(*stacks: Array) -> Array:
    """[L, ...] of a 1, 2 or 4-byte type, or of experts [L, E, N, K], -> the digests of its L, or L * E,
    tensors, [n, 2] uint32; of several stacks one after the other."""
    return jnp.concatenate([_digest(_as_matrices(by_rows(stack))) for stack in stacks])


def by_rows(stack: Any) -> Any:
    """A stack of layers as it is, of layers and experts [L, E, N, K] with one axis for both. (Outside a
    program JAX copies.)"""
    return stack.reshape(-1, *stack.shape[2:]) if stack.ndim == 4 else stack


@jax.jit
def tensor_digests(arrays: Sequence[Array]) -> Array:
    """Digests of n arrays: [n, 2] uint32."""
    return jnp.concatenate([_digest(_as_matrices(array[None])) for array in arrays])


@functools.partial(jax.jit, static_argnums=1)
def checked_row_digests(arrays: Sequence[Array], cuts: tuple[tuple[Cut, ...], ...]) -> Array:
    """Of arrays [L, R, C] the L digests of array[:, start:stop] for each (start, stop, is a scale) of the
    array's entry in `cuts`, and how many of their words are unsound: [n, 3] uint32. A scale's word is sound
    as a positive, finite float32 number, any other word always."""
    parts = [(array[:, a:b], is_scale) for array, rows in zip(arrays, cuts, strict=True)
             for a, b, is_scale in rows]
    tables = [_digest(_as_matrices(part), is_scale) for part, is_scale in parts]
    return jnp.concatenate([jnp.pad(table, [(0, 0), (0, 3 - table.shape[1])]) for table in tables])


@jax.jit
def joined(tables: Sequence[Array]) -> Array:
    """Tables [n, k] one after the other, for a single transfer to the host."""
    return jnp.concatenate(tables)


def torch_words(tensor: torch.Tensor) -> Array:
    """A contiguous torch tensor [..., C] as JAX sees it without a copy: as int32 words, as bytes where rows
    are not whole words.

    Its digest is that of the tensor itself. JAX takes arrays for constants: whoever writes the tensor
    afterwards must not let a computation on this array be in flight.
    """
    import torch

    flat = tensor if tensor.dim() > 1 else tensor[None]
    whole = flat.shape[-1] * flat.element_size() % 4 == 0
    return jax.dlpack.from_dlpack(flat.view(torch.int32 if whole else torch.uint8))


def _as_matrices(stack: Array) -> Array:
    """[L, ..., C] -> [L, R, C]; one number a tensor, and vectors, are a row."""
    lead, *shape = stack.shape
    return stack.reshape(lead, math.prod(shape[:-1]), shape[-1] if shape else 1)


def _words(x: Array) -> Array:
    """[L, R, C] of any type -> [L, R, words] uint32, by strided reads: a bitcast to wider numbers is a pass
    of its own in XLA."""
    size = x.dtype.itemsize
    x, ratio = jax.lax.bitcast_convert_type(x, UNSIGNED[size]), 4 // size
    if missing := -x.shape[-1] % ratio:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing)])
    parts = [x[..., i::ratio].astype(jnp.uint32) << (8 * size * i) for i in range(ratio)]
    return functools.reduce(operator.add, parts)


def _digest(x: Array, is_scale: bool = False) -> Array:
    """[L, R, C] -> [L, 2], or [L, 3] where `is_scale` with the number of unsound words. One reduction, so
    that the tensor is read once, in one kernel where it is small."""
    w = _words(x)
    rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, w.shape, axis) for axis in (1, 2))
    k = _key(rows * np.uint32(w.shape[2]) + columns)
    terms = w * (k | 1), _rot(w) * (_rot(k) | 1)
    if is_scale:
        terms = *terms, ((w == 0) | (w >= np.uint32(INFINITY))).astype(jnp.uint32)
    for over in [(1, 2)] if w.shape[1] * w.shape[2] <= SMALL else [(2,), (1,)]:
        terms = jax.lax.reduce(terms, (jnp.uint32(0),) * len(terms), _add, over)
    return jnp.stack(terms, -1)


def _key(position: Array) -> Array:
    k = position * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15)
    return (k ^ (k >> 15)) * np.uint32(0x85EBCA6B)


def _rot(x: Array) -> Array:
    return x << 16 | x >> 16


def _add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(a, b))
