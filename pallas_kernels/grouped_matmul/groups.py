"""The layout of each expert's rows. Every group starts at a multiple of 128 rows, so that neither a tile of a
product nor a 1x128 block along the tokens contains rows of two experts.

Everything is computed on the device from the group sizes. The number of padded rows must be static; it is the
maximum over all possible sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.quantize import BLOCK


class Groups(NamedTuple):
    """The layout of R sorted rows of E experts in P padded rows, P = `padded_rows(R, E)`; all int32. Made by
    `plan_groups`."""

    sizes: Array  # [E] the number of each expert's rows
    starts: Array  # [E] each expert's first padded row, a multiple of 128
    expert: Array  # [P / 128] the expert of each block of 128 padded rows; E if there is none
    padded: Array  # [R] the padded row of each sorted row; P for a row beyond the last group
    source: Array  # [P] the sorted row of each padded row; R for padding


def padded_rows(rows: int, experts: int) -> int:
    """P, the largest number of padded rows that `rows` rows of `experts` experts can take."""
    return (rows + min(rows, experts) * (BLOCK - 1)) // BLOCK * BLOCK


def plan_groups(group_sizes: Array, rows: int) -> Groups:
    """group_sizes [E] int32, the number of each expert's rows among `rows` rows sorted by expert -> their
    padded layout.

    Sizes may be zero. Rows beyond their sum belong to no expert. Sizes that add up to more than `rows` are
    truncated, since the device cannot raise. Raises ValueError for other shapes or dtypes. Source: see the
    module.
    """
    if group_sizes.ndim != 1 or not group_sizes.size or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(
            f"group_sizes is {group_sizes.dtype}{list(group_sizes.shape)}: expected one integer per expert")
    if rows < 1:
        raise ValueError(f"rows = {rows}: there is nothing to group")
    experts = group_sizes.shape[0]
    p = padded_rows(rows, experts)
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(group_sizes.astype(jnp.int32), 0)), rows)
    firsts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    sizes = ends - firsts
    blocks = (sizes + BLOCK - 1) // BLOCK
    block_ends = jnp.cumsum(blocks)
    starts = (block_ends - blocks) * BLOCK
    expert = _group_of(jnp.arange(p // BLOCK), block_ends)
    sorted_row = jnp.arange(rows, dtype=jnp.int32)
    padded = sorted_row + (starts - firsts).at[_group_of(sorted_row, ends)].get(mode="fill", fill_value=p)
    of_row = jnp.repeat(expert, BLOCK)
    offset = jnp.arange(p, dtype=jnp.int32) - starts.at[of_row].get(mode="fill", fill_value=0)
    inside = offset < sizes.at[of_row].get(mode="fill", fill_value=0)
    source = jnp.where(inside, firsts.at[of_row].get(mode="fill", fill_value=0) + offset, rows)
    return Groups(sizes, starts, expert, lax.min(padded, jnp.int32(p)), source)


def pad_rows(x: Array, groups: Groups) -> Array:
    """Sorted rows x [R, ...] of any dtype -> [P, ...] with zeros for padding. Both this and its inverse are
    gathers. Raises ValueError if x does not have the R rows of `groups`. Source: see the module."""
    x = jnp.asarray(x)
    _check_rows("x", x, groups.padded.shape[0], "sorted")
    return x.at[groups.source].get(mode="fill", fill_value=0)


def unpad_rows(y: Array, groups: Groups) -> Array:
    """Padded rows y [P, ...] of any dtype -> sorted rows [R, ...], with zeros for rows without an expert.
    Raises ValueError if y does not have the P rows of `groups`. Source: see the module."""
    y = jnp.asarray(y)
    _check_rows("y", y, groups.source.shape[0], "padded")
    return y.at[groups.padded].get(mode="fill", fill_value=0)


def _check_rows(name: str, x: Array, rows: int, kind: str) -> None:
    if x.ndim < 1 or x.shape[0] != rows:
        raise ValueError(f"{name} is {x.dtype}{list(x.shape)}: these groups have {rows} {kind} rows")


def by_block(f: Callable[..., Array], rows: tuple[Array, ...], weights: tuple[Array, ...],
             groups: Groups) -> Array:
    """f(128 of `rows` [P, ...], their expert's `weights` [E, ...]) for each block of 128 rows -> [P, N];
    zeros for rows without an expert."""
    experts, weights = groups.sizes.size, tuple(map(jnp.asarray, weights))

    def one(block: tuple[Array, ...]) -> Array:
        *some, e = block
        return jnp.where(e < experts, f(*some, *(w[jnp.minimum(e, experts - 1)] for w in weights)), 0)

    blocks = (a.reshape(-1, BLOCK, a.shape[1]) for a in rows)
    return lax.map(one, (*blocks, groups.expert)).reshape(groups.source.size, -1)


def _group_of(places: Array, ends: Array) -> Array:
    """The group that contains each of `places`, given the `ends` of the groups; the number of groups for a
    place beyond the last."""
    return jnp.sum(places[:, None] >= ends[None, :], 1, dtype=jnp.int32)
