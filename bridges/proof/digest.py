"""A digest of a tensor's bytes and their positions, computed on the tensor's device in a single read of it.

A tensor [R, C] is read as little-endian 32-bit words w[r, c], rows padded with zero bytes to whole words.
With a key k(p) of the position p = r * words a row + c, and rot(x) exchanging the halves of a word,

    digest = ( sum of w * (k | 1),  sum of rot(w) * (rot(k) | 1) )    modulo 2^32, as two uint32

An odd factor is invertible modulo 2^32, so every change of a single word changes the digest. The digests of
two different tensors agree by chance with a probability of about 2^-64. The digest detects accidents; it does
not protect against forgery.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.proof.byte_digest import FACTOR, MIXER, OFFSET

if TYPE_CHECKING:
    import torch

UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# the word of float32 infinity: words of positive finite numbers are smaller, of negative numbers larger
INFINITY = 0x7F800000
SMALL = 2**15  # words that one block of threads sums as fast as many blocks would
Cut = tuple[int, int, bool]


@jax.jit
def stack_digests(*stacks: Array) -> Array:
    """The digests [n, 2] uint32 of the tensors in `stacks`, one stack after the other.

    A stack is [L, ...], or [L, E, N, K] for experts, of a type with 1, 2 or 4 bytes, and holds L, or L * E,
    tensors.
    """
    return jnp.concatenate([_digest(_as_matrices(by_rows(stack))) for stack in stacks])


def by_rows(stack: Any) -> Any:
    """A stack with one axis for all its tensors: experts [L, E, N, K] become [L * E, N, K], other stacks stay
    the same. (Outside a program JAX copies.)"""
    return stack.reshape(-1, *stack.shape[2:]) if stack.ndim == 4 else stack


@jax.jit
def tensor_digests(arrays: Sequence[Array]) -> Array:
    """Digests of n arrays: [n, 2] uint32."""
    return jnp.concatenate([_digest(_as_matrices(array[None])) for array in arrays])


@functools.partial(jax.jit, static_argnums=1)
def checked_row_digests(arrays: Sequence[Array], cuts: tuple[tuple[Cut, ...], ...]) -> Array:
    """Digests of rows of arrays [L, R, C], and the number of unsound words in them: [n, 3] uint32.

    For each (start, stop, is a scale) in the array's entry of `cuts`, there are L digests, of array[:,
    start:stop]. A word of a scale is unsound unless it is a positive, finite float32 number; other words are
    always sound.
    """
    parts = [(array[:, a:b], is_scale) for array, rows in zip(arrays, cuts, strict=True)
             for a, b, is_scale in rows]
    tables = [_digest(_as_matrices(part), is_scale) for part, is_scale in parts]
    return jnp.concatenate([jnp.pad(table, [(0, 0), (0, 3 - table.shape[1])]) for table in tables])


@jax.jit
def joined(tables: Sequence[Array]) -> Array:
    """Concatenate tables [n, k], for a single transfer to the host."""
    return jnp.concatenate(tables)


def jax_view(tensor: torch.Tensor) -> Array:
    """A torch tensor as a JAX array over the same memory. torch exports from a thread's current GPU alone,
    which JAX's programs on several GPUs change, so the tensor's becomes the current one."""
    import torch

    with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
        return jax.dlpack.from_dlpack(tensor)


def torch_words(tensor: torch.Tensor) -> Array:
    """A contiguous torch tensor [..., C] as a JAX array without a copy: int32 words, or bytes if rows are not
    whole words.

    Its digest equals the tensor's. JAX treats arrays as constants, so the tensor must not be written while a
    computation on this array is running.
    """
    import torch

    flat = tensor if tensor.dim() > 1 else tensor[None]
    whole = flat.shape[-1] * flat.element_size() % 4 == 0
    return jax_view(flat.view(torch.int32 if whole else torch.uint8))


def _as_matrices(stack: Array) -> Array:
    """[L, ..., C] -> [L, R, C]; a vector or a single number becomes one row."""
    lead, *shape = stack.shape
    return stack.reshape(lead, math.prod(shape[:-1]), shape[-1] if shape else 1)


def _words(x: Array) -> Array:
    """[L, R, C] of any type -> [L, R, words] uint32, by strided reads, since XLA makes a bitcast to wider
    numbers in a separate pass."""
    size = x.dtype.itemsize
    x, ratio = jax.lax.bitcast_convert_type(x, UNSIGNED[size]), 4 // size
    if missing := -x.shape[-1] % ratio:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing)])
    parts = [x[..., i::ratio].astype(jnp.uint32) << (8 * size * i) for i in range(ratio)]
    return functools.reduce(operator.add, parts)


def _digest(x: Array, is_scale: bool = False) -> Array:
    """[L, R, C] -> digests [L, 2], or, if `is_scale`, [L, 3] with the number of unsound words. A single
    reduction reads the tensor once, in one kernel if it is small."""
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
    k = position * np.uint32(FACTOR) + np.uint32(OFFSET)
    return (k ^ (k >> 15)) * np.uint32(MIXER)


def _rot(x: Array) -> Array:
    return x << 16 | x >> 16


def _add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(x + y for x, y in zip(a, b))
