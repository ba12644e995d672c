"""Sequences of a packed row that share a prefix: the row holds it once.

    a0 a1 a2 a3 a4 | b3 b4 | c2 c3 c4        b begins as a does, with a0 a1 a2; c with a0 a1
    ends of a's    5 tokens: 10 10 7 5 5     token i sees token j iff j <= i < ends[j]

A sequence that shares its first L tokens follows the sequence that has them, and brings its own from L on.
Those that share more come first, so that a row is a tree in depth-first order, and the tokens that see a
token are contiguous: one number a token is the mask of ancestors. A sequence shares no token that it learns
from, and brings the one before the first of these itself, so that each token's log-probability still follows
from the hidden state before it in the row. What another sequence learns from may be shared: it is learned
from where it lies, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def arrange(tokens: Sequence[np.ndarray], learned: Sequence[int], row_tokens: int,
            share: int) -> list[list[tuple[int, int]]]:
    """The sequences of each row, in the order in which they lie there: (index, shared tokens).

    tokens: of each sequence [T] int32. learned: the place of the first token that each learns from. share:
    the least number of tokens that are shared, at least 1. The longest sequence comes first, each into the
    row where it shares most, or into the first with enough room. A row is closed to a sequence only if that
    does not fit even unshared, so `packing.microbatches_needed` holds. Raises ValueError if a sequence is
    longer than a row.
    """
    rows, room = list[_Row](), list[int]()
    begin = [t[:share].tobytes() for t in tokens]
    where: dict[bytes, list[int]] = {}
    for i in sorted(range(len(tokens)), key=lambda i: -len(tokens[i])):
        if len(tokens[i]) > row_tokens:
            raise ValueError(f"sequence {i} has {len(tokens[i])} tokens, a row holds {row_tokens}")
        offers = [(*rows[r].offer(tokens, i, begin, learned[i] - 1), r) for r in where.get(begin[i], ())]
        fits = [(shared, -r, j) for shared, j, r in offers if shared >= share
                and len(tokens[i]) - shared <= room[r]]
        shared, r, parent = max(fits, default=(0, None, -1))
        at = -r if r is not None else next((r for r, free in enumerate(room) if free >= len(tokens[i])), None)
        if at is None:
            at = len(rows)
            rows.append(_Row())
            room.append(row_tokens)
        rows[at].add(i, shared, parent)
        room[at] -= len(tokens[i]) - shared
        if at not in where.setdefault(begin[i], []):
            where[begin[i]].append(at)
    return [row.in_order() for row in rows]


class _Row:
    """A row as it is filled: of each sequence how much it shares, and with which."""

    def __init__(self) -> None:
        self._shared: dict[int, int] = {}
        self._parent: dict[int, int] = {}

    def offer(self, tokens: Sequence[np.ndarray], i: int, begin: Sequence[bytes],
              most: int) -> tuple[int, int]:
        """(the most that sequence i can share here, up to `most`; with which sequence)."""
        alike = [j for j in self._shared if begin[j] == begin[i]]
        return max(((min(_common(tokens[i], tokens[j]), most), j) for j in alike), key=lambda x: x[0])

    def add(self, i: int, shared: int, parent: int) -> None:
        while shared and shared <= self._shared[parent]:  # the sequence that brought the last of these tokens
            parent = self._parent[parent]
        self._shared[i], self._parent[i] = shared, parent if shared else -1

    def in_order(self) -> list[tuple[int, int]]:
        children: dict[int, list[int]] = {}
        for i, parent in self._parent.items():
            children.setdefault(parent, []).append(i)
        order, left = list[tuple[int, int]](), children.get(-1, [])[::-1]
        while left:
            i = left.pop()
            order.append((i, self._shared[i]))
            # the deepest is popped first
            left += sorted(children.get(i, [])[::-1], key=lambda j: self._shared[j])
        return order


def ends_of(members: Sequence[tuple[int, int]]) -> np.ndarray:
    """(length, shared) of each sequence of a row in order -> of each token, the place behind the last that
    sees it [sum of length - shared] int32."""
    total = sum(length - shared for length, shared in members)
    ends, path, at = np.zeros(total, np.int32), np.zeros(0, np.int32), 0
    for length, shared in members:
        ends[path[shared:]] = at
        own = np.arange(at, at + length - shared, dtype=np.int32)
        path, at = np.concatenate([path[:shared], own]), at + length - shared
    ends[path] = at
    return ends


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
