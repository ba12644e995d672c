"""Speculation in the embedded engine: rows that stand idle verify tokens that a sequence may draw next.

A batch decodes a token of each of its R rows, whether a sequence is in the row or not. Once fewer sequences
are left than half the rows, the idle rows' places ("lanes") feed drafts: the tokens that followed, in this
completion or in its siblings, where the same tokens had been written before. A step then costs what it did,
and a row takes as many tokens from it as were drafted rightly, and one more.

    lane of row r        feeds the last token of r, at position p         -> hidden state for token c
    lane that helps r    feeds draft number j, at position p + j          -> hidden state for token c + j

It is exact rejection sampling (Leviathan et al., arXiv 2211.17192). A draft is one token, so it is accepted
with the probability that the policy gives to it: token c is drawn as ever, with its own random numbers, and
where it is the draft, the draft's hidden state is that behind it. So every token is the one that plain
decoding draws from the same seed, and its log-probability is the policy's. What is drafted changes only how
many steps it takes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LONGEST, SHORTEST = 4, 2  # tokens that have to be the same before a draft


class Lanes(NamedTuple):
    """helps [R]: the row that each lane works for, its own where it drafts nothing. ahead [R]: the number of
    its draft, 0 for none. fed [R]: the draft. counted [3]: how often a row had drafts, how many it had, and
    how many were accepted."""

    helps: Array
    ahead: Array
    fed: Array
    counted: Array

    @classmethod
    def none(cls, rows: int) -> Lanes:
        zeros = lambda n: jnp.zeros(n, jnp.int32)  # each a buffer of its own, which may be donated
        return cls(jnp.arange(rows, dtype=jnp.int32), zeros(rows), zeros(rows), zeros(3))


def accepted(drawn: Array, ends: Array, lanes: Lanes, live: Array, most: int) -> tuple[Array, Array, Array]:
    """Which of the tokens `drawn` by R lanes follow each other.

    ends [R]: whether a lane's token would end its sequence. live [R]: the rows that decode. most: drafts of a
    row. -> (lanes [R, most + 1] whose tokens each row takes, in order, R for none; how many it takes [R], the
    lane of the last [R]).
    """
    rows = len(drawn)
    at = jnp.full((rows, most + 1), rows, jnp.int32)
    at = at.at[lanes.helps, lanes.ahead].set(jnp.arange(rows, dtype=jnp.int32))
    at = at.at[:, 0].set(jnp.arange(rows))  # a row's own
    goes_on, last, taken = live, at[:, 0], [jnp.where(live, at[:, 0], rows)]
    for j in range(1, most + 1):
        lane = at[:, j]
        fed = lanes.fed.at[lane].get(mode="fill", fill_value=-1)
        goes_on &= (lane < rows) & (fed == drawn[last]) & ~ends[last]
        last = jnp.where(goes_on, lane, last)
        taken.append(jnp.where(goes_on, lane, rows))
    found = jnp.stack(taken, 1)
    return found, (found < rows).sum(1, dtype=jnp.int32), last


def share_out(live: Array, room: Array, known: Array, most: int) -> tuple[Array, Array]:
    """Lanes of rows that do not decode for those that do -> (helps [R], ahead [R]).

    live [R] bool. room [R]: positions behind the next that a row may write. known [R]: drafts that it has.
    Each row gets one lane before any gets a second.
    """
    rows = len(live)
    own = jnp.arange(rows, dtype=jnp.int32)
    count = live.sum()
    order = jnp.argsort(~live, stable=True).astype(jnp.int32)  # the live rows come first
    nth = jnp.cumsum(~live) - 1
    row, ahead = order[nth % jnp.maximum(count, 1)], nth // jnp.maximum(count, 1) + 1
    drafts = ~live & (count > 0) & (ahead <= most) & (ahead <= room[row]) & (ahead <= known[row])
    return jnp.where(drafts, row, own), jnp.where(drafts, ahead, 0).astype(jnp.int32)


def drafts(tokens: Array, counts: Array, among: Array, most: int) -> tuple[Array, Array]:
    """What followed where the same tokens had been written -> (drafts [R, most], how many there are [R]).

    tokens [N, T] of all sequences, of which the first `counts` [N] are drawn. among [R, G]: a row's own
    sequence, then its siblings; N for none. Of the places where the most of the last LONGEST tokens are the
    same, SHORTEST at least, it is the latest of the first sequence that has one.
    """
    number, length = tokens.shape
    own = among[:, 0]
    count = counts.at[own].get(mode="fill", fill_value=0)
    at = jnp.arange(length)
    # [R, G, T], [R, G]
    said, ends = tokens.at[among].get(mode="clip"), counts.at[among].get(mode="fill", fill_value=0)
    same, run = jnp.zeros(said.shape, jnp.int32), jnp.ones(said.shape, bool)
    for back in range(LONGEST):
        last = jnp.take_along_axis(tokens.at[own].get(mode="clip"), jnp.maximum(count - 1 - back, 0)[:, None],
                                   1)
        shifted = jnp.roll(said, back, -1)  # the token `back` before place t
        run &= (shifted == last[..., None]) & (at >= back) & (count > back)[:, None, None]
        same += run
    followed = (at + 1 < ends[..., None]) & (same >= SHORTEST)
    score = jnp.where(followed, (same * among.shape[1] - jnp.arange(among.shape[1])[:, None]) * length + at,
                      -1)
    best = jnp.argmax(score.reshape(len(among), -1), -1)
    sibling, place = best // length, best % length
    found = jnp.max(score, (1, 2)) >= 0
    source = jnp.take_along_axis(said, sibling[:, None, None], 1)[:, 0]
    behind = place[:, None] + 1 + jnp.arange(most)
    left = jnp.take_along_axis(ends, sibling[:, None], 1)[:, 0] - 1 - place
    return (jnp.take_along_axis(source, jnp.minimum(behind, length - 1), 1),
            jnp.where(found, jnp.clip(left, 0, most), 0).astype(jnp.int32))


