"""Packing of sequences of different lengths into rows of one length, so that the jitted step always sees the
same shapes.

The method is first-fit decreasing (Johnson 1973): the longest sequence first, each into the first row with
enough room. The configuration's worst case, not the batch at hand, fixes the number of micro-batches. The
step therefore compiles only once, and empty micro-batches are skipped on the device (jaxfp8rl.microbatch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfp8rl.data import trees
from jaxfp8rl.types import TrainBatch


class Sample(NamedTuple):
    """A prompt with its completion, or with the turns and observations of a trajectory.

    logprobs [len(completion)] float32: the engine's. advantage: one number for the completion, or one a
    token [len(completion)]. routes [tokens
    - 1, ...] unsigned: the experts of each token but the last (TrainBatch). weights [len(completion)]
    float32: factors of the tokens' losses; None means 1. support: the engine's support ids and sizes
    (Completion). ages [len(completion)] float32: those of TrainBatch; None means 0. sampled [len(completion)]
    bool: the tokens that the policy drew, which alone are learned from; None means all. shared: how many
    tokens of the prompt lie in its row already, in the samples before it (jaxfp8rl.data.trees).
    """

    prompt: Sequence[int]
    completion: Sequence[int] | np.ndarray
    logprobs: np.ndarray
    advantage: float | np.ndarray
    routes: np.ndarray | None = None
    weights: np.ndarray | None = None
    support: tuple[np.ndarray, np.ndarray] | None = None
    ages: np.ndarray | None = None
    sampled: np.ndarray | None = None
    shared: int = 0


def padded_support(ids: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """A completion's support_ids and support_sizes [T] as rows [T, width] int32, padded with -1."""
    rows = np.full((len(sizes), width), -1, np.int32)
    rows[np.arange(width) < np.asarray(sizes)[:, None]] = ids
    return rows


def microbatches_needed(samples: int, longest: int, row_tokens: int, rows: int) -> int:
    """The number of micro-batches of `rows` rows that can hold any `samples` sequences of at most `longest`
    tokens, however they are packed.

    At least floor(row_tokens / longest) sequences fit into a row.
    """
    return math.ceil(math.ceil(samples / (row_tokens // longest)) / rows)


def assign_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """The indices of the sequences in each row, by first-fit decreasing. Ties keep their order, so the result
    is deterministic.

    Raises ValueError if a sequence is longer than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > row_tokens:
            raise ValueError(f"sequence {i} has {lengths[i]} tokens, a row holds {row_tokens}")
        at = next((r for r, free in enumerate(room) if free >= lengths[i]), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(row_tokens)
        rows[at].append(i)
        room[at] -= lengths[i]
    return rows


def pack(
    samples: Sequence[Sample], row_tokens: int, rows_per_microbatch: int, microbatches: int,
    like: np.ndarray | None = None,
    support: int = 0,
    ages: bool = False,
    share: int = 0,
    weighted: bool = False,
) -> TrainBatch:
    """Lay the samples out as a TrainBatch of numpy arrays [microbatches, rows_per_microbatch, row_tokens].

    like: routes of zero tokens, for a batch that has routes even if it has no sample. support: the width of
    the supports, used if all samples have one; a token without a known support then does not count as
    response. ages: whether the batch has ages. share: the least prefix that samples share, in tokens; 0: none
    does, and the batch has no ends. weighted: whether it has loss weights even if no sample does. Raises
    ValueError if the samples do not fit.
    """
    rows = rows_of(samples, row_tokens, microbatches * rows_per_microbatch, share)
    batch = lay_out(rows, row_tokens, Extras.of(samples, like, support, ages, share, weighted))
    return jax.tree.map(lambda x: x.reshape(microbatches, rows_per_microbatch, *x.shape[1:]), batch)


class Extras(NamedTuple):
    """The optional fields of a batch: routes of zero tokens like those of its samples, or None; whether it
    has loss weights; the width of its supports, or 0; whether it has ages; whether it has ends."""

    routes: np.ndarray | None
    weights: bool
    support: int
    ages: bool
    ends: bool = False

    @classmethod
    def of(cls, samples: Sequence[Sample], like: np.ndarray | None, support: int, ages: bool,
           share: int = 0, weighted: bool = False) -> Extras:
        routes = samples[0].routes if samples else like
        weighted |= any(s.weights is not None for s in samples)
        return cls(None if routes is None else routes[:0], weighted,
                   support if all(s.support for s in samples) else 0, ages, share > 0)


def rows_of(samples: Sequence[Sample], row_tokens: int, count: int, share: int = 0) -> list[list[Sample]]:
    """The samples of each of `count` rows, of which the last may be empty. Raises ValueError if the samples
    do not fit."""
    rows = _arranged(samples, row_tokens, share)
    if len(rows) > count:
        raise ValueError(f"{len(rows)} packed rows do not fit {count}")
    placed = [[samples[i]._replace(shared=shared) for i, shared in members] for members in rows]
    return placed + [[] for _ in range(count - len(rows))]


def placed(samples: Sequence[Sample], row_tokens: int, share: int) -> list[Sample]:
    """The samples with what each of them shares in its row."""
    if not share:
        return list(samples)
    return [samples[i]._replace(shared=n) for row in _arranged(samples, row_tokens, share) for i, n in row]


def shared_fraction(samples: Sequence[Sample]) -> float:
    """The share of the tokens of `placed` samples that rows do not hold again."""
    return sum(s.shared for s in samples) / max(1, sum(len(s.prompt) + len(s.completion) for s in samples))


def _arranged(samples: Sequence[Sample], row_tokens: int, share: int) -> list[list[tuple[int, int]]]:
    """The samples of each row, in order: (index, tokens of its prompt that lie before it)."""
    if not share:
        rows = assign_rows([len(s.prompt) + len(s.completion) for s in samples], row_tokens)
        return [[(i, 0) for i in members] for members in rows]
    tokens = [np.concatenate([s.prompt, s.completion]).astype(np.int32) for s in samples]
    learned = [len(s.prompt) + (0 if s.sampled is None else int(np.argmax(s.sampled))) for s in samples]
    return trees.arrange(tokens, learned, row_tokens, share)


def lay_out(rows: Sequence[Sequence[Sample]], row_tokens: int, extras: Extras) -> TrainBatch:
    """The rows as a TrainBatch of numpy arrays [rows, row_tokens]."""
    shape = (len(rows), row_tokens)
    tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
    routes = _no_routes(extras.routes, shape)
    weights = np.zeros(shape, np.float32) if extras.weights else None
    among = np.full((*shape, extras.support), -1, np.int32) if extras.support else None
    old = np.zeros(shape, np.float32) if extras.ages else None
    ends = np.zeros(shape, np.int32) if extras.ends else None
    mask, logp, advantages = np.zeros(shape, bool), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for r, members in enumerate(rows):
        at = 0
        for segment, s in enumerate(members, 1):
            start = at + len(s.prompt) - s.shared
            end = start + len(s.completion)
            tokens[r, at:start], tokens[r, start:end] = s.prompt[s.shared :], s.completion
            positions[r, at:end] = np.arange(s.shared, s.shared + end - at)
            segment_ids[r, at:end] = segment
            mask[r, start:end] = True if s.sampled is None else s.sampled
            logp[r, start:end] = s.logprobs
            advantages[r, start:end] = s.advantage if s.sampled is None else np.where(s.sampled, s.advantage,
                                                                                      0)
            if routes is not None:
                routes[r, at : end - 1] = np.asarray(s.routes)[s.shared :]
            if weights is not None:
                weights[r, start:end] = 1 if s.weights is None else s.weights
            if old is not None and s.ages is not None:
                old[r, start:end] = s.ages
            if among is not None and s.support is not None:
                among[r, start:end] = padded_support(*s.support, extras.support)
                mask[r, start:end] &= s.support[1] > 0
            at = end
        if ends is not None:
            ends[r, :at] = trees.ends_of([(len(s.prompt) + len(s.completion), s.shared) for s in members])
    fields: Any = tokens, positions, segment_ids, mask, logp, advantages, routes, weights, among, old, ends
    return TrainBatch(*fields)


def _no_routes(like: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray | None:
    """Routes [rows, tokens, ...] that leave every token to its routers; None if there are no routes."""
    if like is None:
        return None
    return np.full((*shape, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def unpack(values: np.ndarray, samples: Sequence[Sample], share: int = 0) -> list[np.ndarray]:
    """The completion's part [tokens, ...] of each sample in `values` [M, R, T, ...], which are aligned with
    the batch that `samples` were packed into, with that `share`."""
    rows = values.reshape(-1, *values.shape[2:])
    found: dict[int, np.ndarray] = {}
    for r, members in enumerate(_arranged(samples, rows.shape[1], share)):
        at = 0
        for i, shared in members:
            start = at + len(samples[i].prompt) - shared
            at = start + len(samples[i].completion)
            found[i] = rows[r, start:at]
    return [found[i] for i in range(len(samples))]
