"""Tools for property tests of numerics, in the style of chex: inputs, strategies, assertions and laws.

    from hypothesis import given
    from pallas_kernels import dequantize_rows, quantize_rows, testing

    @given(testing.shapes(), testing.seeds())
    def test_codes_times_scales_are_the_numbers(shape, seed):
        x = testing.tile_distinct(shape, seed=seed, block=(1, 128))
        testing.assert_blockwise_close(dequantize_rows(*quantize_rows(x)), x, rtol=2**-4, block=(1, 128))

Needs chex, hypothesis and numpy; no other module of pallas_kernels imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike, DTypeLike

from pallas_kernels import numerics

__all__ = [
    "CORRECTION_LAWS", "assert_blockwise_close", "assert_same_bits", "check_correction_laws",
    "log_probabilities", "magnitudes", "seeds", "segment_ids", "shapes", "tile_distinct",
]
# Sizes below, at and above tile borders. They are few, because each is compiled.
SIDES = (1, 3, 7, 64, 100, 127, 128, 129, 200, 256, 300)
LENGTHS = (0, 1, 2, 3, 5, 8, 9)
MAGNITUDES = (0.0, 1e-45, 1e-38, 1e-30, 1e-10, 2.0**-9, 0.1, 1.0, 448.0, 464.0, 57344.0, 1e30, 3.4e38)
GARBAGE = (np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0)


# --- inputs -------------------------------------------------------------------------------------------------


def tile_distinct(
    shape: Sequence[int], dtype: DTypeLike = np.float32, seed: int = 0, block: tuple[int, int] = (128, 128)
) -> np.ndarray:
    """Normal numbers [..., M, N], with a magnitude for each block of the last two axes that differs from its
    neighbours'.

    A scale read from the wrong block then makes an error of a factor of 8 (4 in float16, whose range is
    smaller), which no tolerance hides. Magnitudes are 8^-6 to 8^6 (4^-6 to 4^6), and differ along leading
    axes. Raises ValueError for fewer than two axes.
    """
    *lead, m, n = shape if len(shape) > 1 else _two_axes(shape)
    octaves = 2.0 if np.dtype(dtype) == np.float16 else 3.0
    made = [numerics.tile_distinct((m, n), block, seed + i, octaves) for i in range(math.prod(lead))]
    return np.stack(made).reshape(*lead, m, n).astype(dtype) if made else np.zeros(tuple(shape), dtype)


def _two_axes(shape: Sequence[int]) -> Sequence[int]:
    raise ValueError(f"shape {tuple(shape)}: blocks span the last two axes, so there must be at least two")


# --- strategies ---------------------------------------------------------------------------------------------


def seeds() -> st.SearchStrategy[int]:
    """Seeds of a random generator."""
    return st.integers(0, 2**32 - 1)


def shapes(dims: int = 2, sides: Sequence[int] = SIDES) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `dims` sides; by default some sides are below, at and above multiples of 64 and 128."""
    return st.tuples(*[st.sampled_from(sides)] * dims)


def magnitudes(largest: float = math.inf) -> st.SearchStrategy[float]:
    """Magnitudes that an FP8 quantiser must handle: zero, float32's subnormals, the floors of scales, the
    largest codes, float32's largest number, or anything between; none above `largest`."""
    edges = [m for m in MAGNITUDES if m <= largest]
    top = float(min(largest, float(np.finfo(np.float32).max)))
    return st.sampled_from(edges) | st.floats(0, np.float32(top).item(), width=32)


def segment_ids(
    tokens: int, max_segments: int = 6, lengths: Sequence[int] = LENGTHS, max_front: int = 3
) -> st.SearchStrategy[np.ndarray]:
    """Packed rows [tokens] int32: runs 1, 2, ... of these lengths (a run of length 0 leaves a gap in the
    numbers), with at most `max_front` tokens of padding (0) before them and padding up to `tokens` after
    them."""

    def packed(runs: list[int], front: int) -> np.ndarray:
        ids = np.repeat(np.arange(len(runs)) + 1, runs)[: tokens - front]
        return np.pad(ids, (front, tokens - front - len(ids))).astype(np.int32)

    return st.builds(
        packed,
        st.lists(st.sampled_from(lengths), max_size=max_segments),
        st.integers(0, min(max_front, tokens)),
    )


def log_probabilities(shape: Sequence[int]) -> st.SearchStrategy[np.ndarray]:
    """float32 arrays of `shape` in nats, none above 0: of ordinary tokens, of nearly certain ones, of ones
    whose probability underflows in float32 (below -104), and exact zeros."""

    def drawn(seed: int, scale: float, certain: float) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return np.where(rng.random(shape) < certain, 0.0, -rng.exponential(scale, shape)).astype(np.float32)

    return st.builds(
        drawn, seeds(), st.sampled_from((1e-6, 0.1, 1.0, 10.0, 150.0)), st.sampled_from((0.0, 0.2))
    )


# --- assertions ---------------------------------------------------------------------------------------------


def assert_blockwise_close(
    actual: ArrayLike,
    desired: ArrayLike,
    *,
    rtol: float,
    block: tuple[int, int] = (128, 128),
    atol: float = 0.0,
) -> None:
    """Assert that every |actual - desired| is at most `rtol` times the largest |desired| of its block, plus
    `atol`.

    Blocks lie in the last two axes and end where the array does: (128, 128) for weights, (1, 128) along the
    contraction, (1, N) for rows. A vector counts as one row. A small block counts as much as a large one,
    which an error relative to the whole array would hide. NaN equals NaN, and an infinity one of the same
    sign. Raises AssertionError, which names the worst block and the worst number in it.
    """
    got, want = (np.atleast_2d(np.asarray(x).astype(np.float64)) for x in (actual, desired))
    assert got.shape == want.shape, f"shapes differ: actual {got.shape}, desired {want.shape}"
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(finite, np.abs(got - want), np.where(_alike(got, want), 0.0, np.inf))
    error = np.where(np.isnan(error), np.inf, error)
    limit = rtol * _blocks(np.where(finite, np.abs(want), 0.0), block) + atol
    worst = _blocks(error, block)
    if (worst > limit).any():
        raise AssertionError(_blockwise_message(got, want, error, worst, limit, block))


def _alike(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return (got == want) | (np.isnan(got) & np.isnan(want))


def _blocks(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The largest number of each block: [..., M, N] without negative numbers -> [..., ceil(M / block), ceil(N
    / block)]."""
    (m, n), (rows, columns) = x.shape[-2:], block
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -m % rows), (0, -n % columns)])
    tiles = padded.reshape(*x.shape[:-2], -(-m // rows), rows, -(-n // columns), columns)
    return tiles.max((-3, -1), initial=0.0)


def _blockwise_message(got, want, error, worst, limit, block: tuple[int, int]) -> str:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(worst > limit, worst / limit, 0.0)
    at = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
    *lead, i, j = at
    inside = (*lead, slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
    p, q = (int(k) for k in np.unravel_index(np.argmax(error[inside]), error[inside].shape))
    number = (*lead, i * block[0] + p, j * block[1] + q)
    return (
        f"{int((worst > limit).sum())} of {worst.size} blocks of {block[0]}x{block[1]} are too far apart. "
        f"The worst is block {at}: at {number} actual {got[number]:.9g}, desired {want[number]:.9g}, "
        f"error {worst[at]:.3g}, {ratio[at]:.3g} times the limit {limit[at]:.3g}"
    )


def assert_same_bits(actual: Any, desired: Any) -> None:
    """Assert that two arrays, or trees of arrays, are bitwise equal: the sign of a zero and the payload of a
    NaN count.

    Any dtype works, FP8 and bfloat16 included. Raises AssertionError with the first index that differs, both
    numbers there with their bits, and the number of differences; or with the structures, shapes or dtypes if
    those differ.
    """
    chex.assert_trees_all_equal_structs(actual, desired)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(actual)[0], jax.tree.leaves(desired)):
        _assert_same_bits(jax.tree_util.keystr(path), np.asarray(a), np.asarray(b))


def _assert_same_bits(name: str, a: np.ndarray, b: np.ndarray) -> None:
    found = f"{name + ': ' if name else ''}{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{found} differ in dtype or shape"
    x, y = (np.frombuffer(np.ascontiguousarray(v).tobytes(), np.uint8).reshape(v.size, -1) for v in (a, b))
    differ = np.flatnonzero((x != y).any(1)) if a.size else np.zeros(0, int)
    if differ.size:
        first = int(differ[0])
        at = tuple(int(i) for i in np.unravel_index(first, a.shape))
        bits = " and ".join("0x" + v[first][::-1].tobytes().hex() for v in (x, y))
        raise AssertionError(
            f"{found}: {differ.size} of {a.size} differ, first at {at}: {a[at]} and {b[at]}, bits {bits}"
        )


# --- laws of a correction -----------------------------------------------------------------------------------

Correct = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[ArrayLike, ArrayLike]]


class Batch(NamedTuple):
    """old_logp, rollout_logp [B, T] float32 and mask [B, T] bool, one sequence per row, with garbage under
    the mask."""

    old: np.ndarray
    rollout: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, seed: int, sequences: int, tokens: int, mismatch: float) -> Batch:
        """A random batch in which every sequence has a live token, and a masked one if there is room."""
        rng, shape = np.random.default_rng(seed), (sequences, tokens)
        mask = rng.random(shape) < 0.7
        mask[:, 0], mask[:, 1:2] = True, False
        base, apart = -rng.exponential(1.0, shape), mismatch * rng.normal(size=shape)
        pair = (np.minimum(base + sign * apart / 2, 0) for sign in (1, -1))
        old, rollout = (
            np.where(mask, x, rng.choice(GARBAGE, shape)).astype(np.float32) for x in pair
        )
        return cls(old, rollout, mask)


def _run(correct: Correct, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):  # values under the mask may warn
        weights, keep = (np.asarray(x) for x in correct(*batch))
    chex.assert_shape([weights, keep], batch.mask.shape)
    return weights.astype(np.float64), keep.astype(bool)


def _same(batch: Batch, got: tuple, want: tuple, rtol: float) -> None:
    """Assert that two results agree on live tokens."""
    np.testing.assert_array_equal(got[1][batch.mask], want[1][batch.mask], "the kept tokens differ")
    chex.assert_trees_all_close(got[0][batch.mask], want[0][batch.mask], rtol=rtol, atol=1e-6)


def _equal_policies(correct: Correct, batch: Batch, rtol: float) -> None:
    weights, keep = _run(correct, batch._replace(rollout=batch.old))
    assert keep[batch.mask].all(), "a token of equal policies is rejected"
    np.testing.assert_allclose(weights[batch.mask], 1.0, rtol, err_msg="a weight of equal policies is not 1")


def _masked_tokens(correct: Correct, batch: Batch, rtol: float) -> None:
    clean = batch._replace(
        old=np.where(batch.mask, batch.old, -1), rollout=np.where(batch.mask, batch.rollout, -1)
    )
    _same(batch, _run(correct, batch), _run(correct, clean), rtol)


def _bounded(correct: Correct, batch: Batch, rtol: float) -> None:
    old, rollout = (np.where(batch.mask, x, 0) for x in batch[:2])
    for scale in (1, 400):  # scales of the mismatch: ratios up to float32's overflow, and down to 0
        apart = scale * (old - rollout)
        old, rollout = (np.where(batch.mask, np.minimum(x, 0), np.nan) for x in (apart, -apart))
        weights, keep = _run(correct, Batch(old, rollout, batch.mask))
        live = weights[batch.mask & keep]
        assert np.isfinite(live).all(), f"a weight is {live[~np.isfinite(live)][0]}"
        assert (live >= 0).all(), f"a weight is {live.min()}"


def _permuted(correct: Correct, batch: Batch, rtol: float) -> None:
    order = np.roll(np.arange(len(batch.mask)), 1)[::-1]
    moved = Batch(*(x[order] for x in batch))
    _same(moved, _run(correct, moved), tuple(x[order] for x in _run(correct, batch)), rtol)


def _padded(correct: Correct, batch: Batch, rtol: float) -> None:
    (rows, columns), fill = batch.mask.shape, (np.nan, np.inf, False)
    wide = Batch(*(np.pad(x, ((0, 1), (0, 3)), constant_values=f) for x, f in zip(batch, fill)))
    cut = tuple(x[:rows, :columns] for x in _run(correct, wide))
    _same(batch, cut, _run(correct, batch), rtol)


CORRECTION_LAWS: dict[str, Callable[[Correct, Batch, float], None]] = {
    "equal policies give weight 1 and keep every token": _equal_policies,
    "values under the mask have no effect": _masked_tokens,
    "weights of kept tokens are finite and not negative": _bounded,
    "permuting the sequences permutes the weights": _permuted,
    "padding changes nothing": _padded,
}


def check_correction_laws(
    correct: Correct, *, laws: Collection[str] = tuple(CORRECTION_LAWS), seeds: Collection[int] = range(3),
    sequences: int = 4, tokens: int = 8, mismatch: float = 0.5, rtol: float = 1e-4,
) -> None:
    """Assert that a correction of the mismatch between the learner's policy and the sampler's obeys `laws`,
    names from `CORRECTION_LAWS`.

    correct(old_logp, rollout_logp, mask) -> (weights, keep): log-probabilities in nats [B, T] float32, one
    sequence per row, and a bool mask; values under the mask are NaN, infinities and large numbers. Results
    are [B, T] and count only where mask is True. `mismatch`: the spread of old_logp - rollout_logp, in nats.
    `rtol`: the tolerance between weights that must agree. Raises AssertionError with the broken law, the seed
    and the difference; ValueError for an unknown law.
    """
    unknown = set(laws) - CORRECTION_LAWS.keys()
    if unknown:
        raise ValueError(f"no such law: {', '.join(sorted(unknown))}; known: {', '.join(CORRECTION_LAWS)}")
    for seed in seeds:
        batch = Batch.of(seed, sequences, tokens, mismatch)
        for law in laws:
            try:
                CORRECTION_LAWS[law](correct, batch, rtol)
            except AssertionError as error:
                raise AssertionError(f"broken law: {law} (seed {seed}): {error}") from error
