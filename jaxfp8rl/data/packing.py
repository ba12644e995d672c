"""Packing of sequences of different lengths into rows of one length, so that the jitted step always sees one
shape.

First-fit decreasing (Johnson 1973): longest first, each into the first row that still has room. The worst
case of the configuration fixes the number of micro-batches, not the batch at hand: a step that was compiled
once never compiles again, and empty micro-batches are skipped on the device (jaxfp8rl.microbatch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxfp8rl.types import TrainBatch


class Sample(NamedTuple):
    """A prompt with its completion. `logprobs` [len(completion)] float32 are the engine's; `advantage` is one
    number. `routes` [tokens but the last, ...] unsigned: the experts of each (TrainBatch). `weights`
    [len(completion)] float32: factors of the tokens' losses; None: all are 1. `support`: the engine's ids and
    sizes (Completion)."""

    prompt: Sequence[int]
    completion: Sequence[int] | np.ndarray
    logprobs: np.ndarray
    advantage: float
    routes: np.ndarray | None = None
    weights: np.ndarray | None = None
    support: tuple[np.ndarray, np.ndarray] | None = None


def padded_support(ids: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """support_ids and support_sizes [T] of a completion -> [T, width] int32, -1 behind the last of each."""
    rows = np.full((len(sizes), width), -1, np.int32)
    rows[np.arange(width) < np.asarray(sizes)[:, None]] = ids
    return rows


def microbatches_needed(samples: int, longest: int, row_tokens: int, rows: int) -> int:
    """Micro-batches of `rows` rows that hold any `samples` sequences of at most `longest` tokens, however
    they fall.

    With one sequence of the longest kind always fitting, at least floor(row_tokens / longest) share a row.
    """
    return math.ceil(math.ceil(samples / (row_tokens // longest)) / rows)


def assign_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the sequences in each row, first-fit decreasing; ties keep their order, so the result is
    deterministic.

    Raises ValueError when a sequence is longer than a row.
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
) -> TrainBatch:
    """Lay the samples out as a TrainBatch of numpy arrays [microbatches, rows_per_microbatch, row_tokens].

    like: routes of no tokens, for a batch that has routes even without a sample. support: width of the
    supports, if all samples have one; then a token whose support is not known does not count as response.
    Raises ValueError if the samples do not fit.
    """
    rows = assign_rows([len(s.prompt) + len(s.completion) for s in samples], row_tokens)
    shape = (microbatches * rows_per_microbatch, row_tokens)
    if len(rows) > shape[0]:
        raise ValueError(f"{len(rows)} packed rows do not fit {shape[0]}")
    tokens, positions, segment_ids = (np.zeros(shape, np.int32) for _ in range(3))
    routes = _no_routes(samples[0].routes if samples else like, shape)
    weights = np.zeros(shape, np.float32) if any(s.weights is not None for s in samples) else None
    among = np.full((*shape, support), -1, np.int32) if support and all(s.support for s in samples) else None
    mask, logp, advantages = np.zeros(shape, bool), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for r, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members, 1):
            s = samples[i]
            start, end = at + len(s.prompt), at + len(s.prompt) + len(s.completion)
            tokens[r, at:start], tokens[r, start:end] = s.prompt, s.completion
            positions[r, at:end] = np.arange(end - at)
            segment_ids[r, at:end] = segment
            mask[r, start:end] = True
            logp[r, start:end] = s.logprobs
            advantages[r, start:end] = s.advantage
            if routes is not None:
                routes[r, at : end - 1] = s.routes
            if weights is not None:
                weights[r, start:end] = 1 if s.weights is None else s.weights
            if among is not None and s.support is not None:
                among[r, start:end] = padded_support(*s.support, support)
                mask[r, start:end] = s.support[1] > 0
            at = end
    fields = tokens, positions, segment_ids, mask, logp, advantages, routes, weights, among
    return TrainBatch(*jax.tree.map(lambda x: x.reshape(microbatches, rows_per_microbatch, *x.shape[1:]),
                                    fields))


def _no_routes(like: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray | None:
    """Routes [rows, tokens, ...] that leave every token to its routers; None if there are no routes."""
    if like is None:
        return None
    return np.full((*shape, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def unpack(values: np.ndarray, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The part of each sample's completion, [tokens, ...], of [M, R, T, ...] `values` aligned with the batch
    that `samples` were packed to."""
    rows = values.reshape(-1, *values.shape[2:])
    found: dict[int, np.ndarray] = {}
    for r, members in enumerate(assign_rows([len(s.prompt) + len(s.completion) for s in samples],
                                            rows.shape[1])):
        at = 0
        for i in members:
            start = at + len(samples[i].prompt)
            at = start + len(samples[i].completion)
            found[i] = rows[r, start:at]
    return [found[i] for i in range(len(samples))]
