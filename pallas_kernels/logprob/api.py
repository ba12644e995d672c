"""Log-probability and entropy of a softmax over a large vocabulary, z = x w^T / temperature, forward and
backward.

The logits [M, N] are never materialised. The forward pass computes them one block of rows at a time. For each
row it keeps the maximum m, the sum s of exp(z - m), the sum t of exp(z - m) (z - m), and z at the target y:

    log p(y) = (z_y - m) - log s        entropy = log s - t / s

The backward pass recomputes the logits one block of words at a time. From them it computes dz, the gradient
of z, in the dtype of x, and multiplies it twice. With cotangents g of log p(y) and h of the entropy H, and p
= softmax(z):

    dz = g (onehot(y) - p) - h p (log p + H)        dx = dz w        dw = dz^T x

A soft cap c puts c tanh(x w^T / c) in the place of x w^T, and 1 - tanh^2 is a factor of dz.

This takes four products; a loss that knows g before the logits are dropped needs three, and
docs/notebook_logprob.md gives the reasons. Blocks of words suit the backward pass: each block owns its rows
of dw, summed over all rows of x in one product.

A sampler that keeps only the likeliest words (top-k, top-p) draws from a softmax over these, the `support` of
its row. All sums then run over the support; the logits of other words are computed and dropped. The kernel
does not implement a support, so the reference computes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.logprob import reference, sm90
from pallas_kernels.logprob.softcap import check_cap
from pallas_kernels.plgpu_compat import Backend, use_kernel
from pallas_kernels.shards import enter, leave

MEMORY = 850_000_000  # bytes of a block of logits, its gradient, and the rows of w that it belongs to
CAPACITIES = 4  # the number of backward programs, each for a different number of rows
# The smallest number of rows of such a program. Fewer rows are not compacted, and the kernel's forward pass
# takes this many at a time.
FEWEST = 2048
T = TypeVar("T")
DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32)))
GRAIN = 256  # rows of two tiles of the kernel
BOX = 64  # rows or columns that the kernel's copies move together


class Static(NamedTuple):
    """The arguments that do not change from call to call."""

    temperature: float
    softcap: float | None
    logits_dtype: jnp.dtype
    kernel: bool
    words: int  # words of w; for the kernels w has rows of padding after them
    block: int  # rows at a time in the forward pass
    memory: int
    tiles: sm90.Tiles
    interpret: object


class Rows(NamedTuple):
    """The rows of x that take part: the first `taken` of `order` [M] int32."""

    order: Array
    taken: Array

    @classmethod
    def of(cls, live: Array) -> Rows:
        return cls(jnp.argsort(~live, stable=True).astype(jnp.int32), jnp.sum(live, dtype=jnp.int32))


def linear_logprob(
    x: Array, w: Array, targets: Array, live: Array | None = None, *, temperature: float = 1.0,
    logits_dtype: jnp.dtype = jnp.float32, axis_name: str | None = None, backend: Backend = "auto",
    memory: int = MEMORY, tiles: sm90.Tiles | None = None, interpret=None, support: Array | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """x [M, K], w [N, K] of one float dtype, targets [M] int -> log p(target) [M] and entropy [M] in nats,
    float32.

    Rows where `live` [M] bool is False are 0, get no gradient, and cost little. Logits are rounded to
    `logits_dtype` before they are divided by `temperature`; the gradient ignores the rounding. A target
    outside the vocabulary gives a log p of NaN. memory: bytes that blocks of logits may take.

    softcap: c tanh(logit / c) takes the place of each logit, before the temperature; its steps are rounded to
    `logits_dtype`, too. None: there is no cap.

    support [M, S] int: the words of each row's softmax, which always includes its target; -1, or any other id
    outside the vocabulary, means no word. Always computed by the reference.

    axis_name: w is this device's part of the words, in the order of that axis of a `shard_map`. targets count
    all words; x and the results are the same on all devices. Derivatives must be taken inside the
    `shard_map`, with `check_vma=False` (pallas_kernels.shards).

    Raises ValueError, with the shapes and the rule, for anything else. Source: the definition of the softmax;
    the formulas are in the module's docstring.
    """
    x, w, targets = map(jnp.asarray, (x, w, targets))
    _check(x, w, targets, live, support)
    check_temperature(temperature)
    check_cap(softcap)
    kernel = _use_kernel(x, w, backend, support)
    (words, _), m = w.shape, x.shape[0]
    block = _block(m, FEWEST if kernel else memory // (4 * words), kernel)
    tiles = tiles or sm90.Tiles()
    static = Static(float(temperature), softcap, jnp.dtype(logits_dtype), kernel, words, block, memory, tiles,
                    interpret)
    w = jnp.pad(w, ((0, _padded_words(words) - words), (0, 0))) if kernel else w
    missing = -m % block
    x, targets = jnp.pad(x, ((0, missing), (0, 0))), jnp.pad(targets.astype(jnp.int32), (0, missing))
    if support is not None:
        support = jnp.pad(support.astype(jnp.int32), ((0, missing), (0, 0)), constant_values=-1)
    if live is None:
        rows = None
    elif m <= FEWEST:
        rows, x = None, jnp.where(jnp.pad(live, (0, missing))[:, None], x, jnp.zeros((), x.dtype))
    else:
        rows = Rows.of(jnp.pad(live, (0, missing)))
    if axis_name:
        logp, entropy = _shared(static, x, w, targets, support, rows, axis_name)
    else:
        # partial(custom_vjp) hides the type of its result
        logp, entropy, _ = _logprob(  # pyright: ignore[reportGeneralTypeIssues]
            static, x, w, targets, support, rows)
    all_words = words * (lax.axis_size(axis_name) if axis_name else 1)
    logp = jnp.where((targets >= 0) & (targets < all_words), logp, jnp.nan)
    of_rows = lambda a: a[:m] if live is None else jnp.where(live, a[:m], 0.0)
    return of_rows(logp), of_rows(entropy)


def check_temperature(temperature: float) -> None:
    """Raise ValueError for an invalid temperature. Greedy decoding, a temperature of 0, has no
    log-probabilities."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature = {temperature}: logits are divided by a finite number above 0")


def _check(x: Array, w: Array, targets: Array, live: Array | None, support: Array | None) -> None:
    found = f"x is {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}"
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or not x.size or not w.size:
        raise ValueError(f"{found}: expected x [M, K] and w [N, K], with M, N and K above 0")
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        raise ValueError(f"{found}: expected one dtype of {', '.join(map(str, DTYPES))}")
    if targets.shape != x.shape[:1] or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"targets is {targets.dtype}{list(targets.shape)}: expected an integer per row of x, "
            f"[{x.shape[0]}]")
    if live is not None and (live.shape != x.shape[:1] or live.dtype != bool):
        raise ValueError(
            f"live is {live.dtype}{list(live.shape)}: expected a bool per row of x, [{x.shape[0]}]")
    if support is not None and not (
        support.ndim == 2 and support.shape[0] == x.shape[0] and jnp.issubdtype(support.dtype, jnp.integer)
    ):
        raise ValueError(
            f"support is {support.dtype}{list(support.shape)}: expected integers [{x.shape[0]}, S]")


def why_reference(dtype: jnp.dtype, width: int, support: bool = False) -> str:
    """The reason why the kernels do not take x [M, width] of this dtype, with a `support` or without, on any
    GPU; "" if they do."""
    if support:
        return "does not implement a support"
    if jnp.dtype(dtype) == jnp.float32:
        return "takes bfloat16 or float16, not float32"
    return f"takes widths in multiples of {BOX}, not {width}" if width % BOX else ""


def _use_kernel(x: Array, w: Array, backend: Backend, support: Array | None) -> bool:
    """Whether the kernels compute it. Operands that they do not take go to the reference; with backend
    "pallas" they are an error."""
    why = why_reference(x.dtype, x.shape[1], support is not None)
    if backend == "pallas" and why:
        raise ValueError(
            f'backend = "pallas" {why}; x is {x.dtype}{list(x.shape)}, w {list(w.shape)}: use "auto"')
    return use_kernel(backend) and not why


def _padded_words(words: int) -> int:
    """The words padded to whole boxes, at least two, because Mosaic drops the index of a single box."""
    return max(-(-words // BOX), 2) * BOX


def _shared(
    static: Static, x: Array, w: Array, targets: Array, support: Array | None, rows: Rows | None,
    axis_name: str
) -> tuple[Array, Array]:
    """The results for words on several devices. With q this device's share of the probability, its log p
    gains log q, and its part of the entropy is q (its own entropy - log q)."""
    x = enter(x, axis_name)
    first = lax.axis_index(axis_name) * static.words
    targets, support = jax.tree.map(lambda ids: ids - first, (targets, support))
    logp, entropy, lse = _logprob(  # pyright: ignore[reportGeneralTypeIssues]  # as above
        static, x, w, targets, support, rows)
    highest = lax.pmax(lax.stop_gradient(lse), axis_name)
    log_share = lse - highest - jnp.log(lax.psum(jnp.exp(lse - highest), axis_name))
    here = (targets >= 0) & (targets < static.words)
    parts = jnp.where(here, logp + log_share, 0.0), jnp.exp(log_share) * (entropy - log_share)
    return leave(parts[0], axis_name), leave(parts[1], axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(
    static: Static, x: Array, w: Array, targets: Array, support: Array | None, rows: Rows | None
) -> tuple[Array, Array, Array]:
    """log p(target), entropy and log sum exp z over the words of w alone. For a target on another device the
    first is meaningless."""
    return _forward(static, x, w, targets, support, rows)[0]


def _forward(static: Static, x: Array, w: Array, targets: Array, support: Array | None, rows: Rows | None):
    found = _statistics(static, x, w, targets, support, rows)
    if rows:
        found = jnp.where(jnp.arange(x.shape[0]) < rows.taken, found, 1.0)  # finite for the other rows too
        found = jnp.zeros_like(found).at[:, rows.order].set(found, unique_indices=True)
    # The barrier keeps all four in every program: without the entropy, XLA for GPUs sums `total` in another
    # order.
    highest, total, weighted, at_target = lax.optimization_barrier(found)
    log_total = jnp.log(total)
    entropy, lse = log_total - weighted / total, highest + log_total
    return (at_target - highest - log_total, entropy, lse), (x, w, targets, support, lse, entropy)


def _statistics(static: Static, x: Array, w: Array, targets: Array, support: Array | None,
                rows: Rows | None) -> Array:
    """`reference.statistics` of the rows in their order, a block at a time; blocks without live rows are
    skipped."""
    block, most = static.block, x.shape[0] // static.block

    def one(i: Array, found: Array) -> Array:
        some_x, some_targets, some_support = _rows((x, targets, support), rows, i * block, block)
        args = some_x, w, some_targets, static.temperature, static.logits_dtype
        if static.kernel:
            part = _merged(sm90.statistics(*args, static.tiles, static.interpret, words=static.words,
                                           softcap=static.softcap))
        else:
            part = reference.statistics(*args, some_support, static.softcap)
        return lax.dynamic_update_slice_in_dim(found, part, i * block, 1)

    turns = -(-rows.taken // block) if rows else most
    return _loop(most, turns, one, jnp.ones_like(x, jnp.float32, shape=(4, x.shape[0])))


@jax.named_scope("merged_statistics")
def _merged(parts: Array) -> Array:
    """Statistics [4, P, M] of P parts of the words -> [4, M] of all words."""
    highest, total, weighted, at_target = parts
    new = jnp.max(highest, 0)
    below = highest - new
    factor = jnp.exp(below)
    return jnp.stack([new, jnp.sum(total * factor, 0), jnp.sum((weighted + total * below) * factor, 0),
                      jnp.sum(at_target, 0)])


def _backward(static: Static, kept: tuple, cotangents: tuple[Array, Array, Array]):
    x, w, targets, support, lse, entropy = kept
    g, h, of_lse = (c / static.temperature for c in cotangents)
    vectors = support, targets, lse, g, of_lse - g - h * entropy, -h
    sizes = _capacities(x.shape[0])
    if len(sizes) == 1:
        d_x, d_w = _gradients(static, x.shape[0], x, w, vectors, None)
    # Rows without a cotangent take no part: tokens that are not live, have no advantage, or were clipped or
    # rejected.
    else:
        rows = Rows.of((g != 0) | (h != 0) | (of_lse != 0))
        enough = sum((rows.taken > size).astype(jnp.int32) for size in sizes[:-1])
        d_x, d_w = lax.switch(enough, [functools.partial(_gradients, static, s) for s in sizes], x, w,
                              vectors, rows)
    return d_x.astype(x.dtype), d_w, None, None, None


_logprob.defvjp(_forward, _backward)


def _gradients(static: Static, size: int, x: Array, w: Array, vectors: tuple,
               rows: Rows | None) -> tuple[Array, Array]:
    """(dx [M, K] float32, dw [N, K]) from the first `size` rows in their order, a block of words at a time.

    A last block that would exceed the end starts earlier, with zeros for the words that another block has.
    Their dw is wrong at first; that other block overwrites it, because blocks are taken from the last to the
    first.
    """
    words = w.shape[0]
    a_word = size * (x.dtype.itemsize + 4 * (not static.kernel)) + 2 * x.shape[1] * x.dtype.itemsize
    block = min(_block(words, static.memory // a_word, static.kernel), words)
    blocks = -(-words // block)
    picked, support, targets, *by_row = _rows((x, *vectors), rows, 0, size)
    if rows:  # rows that take no part must not contribute, whatever they hold
        live = jnp.arange(size) < rows.taken
        picked = jnp.where(live[:, None], picked, jnp.zeros((), x.dtype))
        by_row = [jnp.where(live, v, 0.0) for v in by_row]
    more = (static.tiles, static.interpret) if static.kernel else ()
    within = lambda start: () if support is None else (support - start,)
    d_logits: Callable[..., Array] = sm90.d_logits if static.kernel else reference.d_logits

    def one(step: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        d_x, d_w = sums
        first = (blocks - 1 - step) * block
        start = jnp.minimum(first, words - block)
        own = jnp.arange(block)[:, None] >= first - start
        part = jnp.where(own, lax.dynamic_slice_in_dim(w, start, block), jnp.zeros((), w.dtype))
        dz = d_logits(picked, part, targets - start, *by_row, static.temperature, static.logits_dtype, *more,
                      *within(start), softcap=static.softcap)
        d_w = lax.dynamic_update_slice_in_dim(d_w, reference.d_w(dz, picked), start, 0)
        return d_x + reference.d_x(dz, part), d_w

    zeros = jnp.zeros_like(picked, jnp.float32), jnp.zeros_like(w)
    d_x, d_w = _loop(blocks, blocks, one, zeros)
    if rows:
        d_x = jnp.zeros_like(x, d_x.dtype).at[rows.order[:size]].set(d_x, unique_indices=True)
    return d_x, d_w


def _loop(most: int, turns: Array | int, body: Callable[[Array, T], T], state: T) -> T:
    """Run body(i, state) for i < turns <= most. A single iteration is not made a loop, which takes long to
    compile."""
    return body(jnp.int32(0), state) if most == 1 else lax.fori_loop(0, turns, body, state)


def _rows(arrays: tuple[Array | None, ...], rows: Rows | None, start: Array | int,
          size: int) -> tuple[Any, ...]:
    """`size` rows from `start` on of each array that is not None, in their order."""
    if rows is None:
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), arrays)
    at = lax.dynamic_slice_in_dim(rows.order, start, size)
    return jax.tree.map(lambda a: a.at[at].get(mode="promise_in_bounds", unique_indices=True), arrays)


def _capacities(rows: int) -> list[int]:
    """The numbers of rows with a program; the smallest that holds all live rows is used."""
    step = max(FEWEST, -(-rows // (CAPACITIES * GRAIN)) * GRAIN)
    return [*range(step, rows, step), rows]


def _block(size: int, most: int, whole: bool) -> int:
    """The size of equal blocks of at most `most` that cover `size` with the least excess. It is a multiple of
    GRAIN if that fits, or if `whole` requires it."""
    grain = GRAIN if whole or GRAIN <= most < size else 1
    fewest = -(-size // max(grain, most - most % grain))
    sizes = (-(-size // (blocks * grain)) * grain for blocks in range(fewest, 2 * fewest))
    return min(sizes, key=lambda block: -(-size // block) * block)
