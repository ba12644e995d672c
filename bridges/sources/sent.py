"""The parts of a source during a publish: torch views of them, and their digests.

The engine is in the same process (`bridges.transports.vllm_inplace`).
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bridges.api import ParamMeta, Rows, StackRow, StackSource, WeightSource
from bridges.inside_vllm.stacks import layer_of
from bridges.proof import manifest
from bridges.proof.digest import by_rows, joined, stack_digests, tensor_digests, torch_words
from bridges.sources.dlpack import torch_view

if TYPE_CHECKING:
    import torch

PART = 512 * 2**20  # maximal bytes of a part that a source makes during the publish; one exists at a time


class Sent:
    """The tensors of one publish: torch views, and digests, which are computed asynchronously.

    A stack is exported once and one program digests its rows. A stack that is not held is dropped with its
    part.

    place: HF name -> row in the table of digests. places: the rows for all names of a stack, cached between
    publishes because experts have tens of thousands of names.
    """

    def __init__(self, place: dict[str, int], places: dict[tuple[str, ...], np.ndarray] | None = None):
        self._place, self._places = place, {} if places is None else places
        self._held: dict[int, tuple[jax.Array, torch.Tensor]] = {}  # id -> (a held stack, its view)
        self._table_of: dict[int, int] = {}  # id of a held stack -> its table
        self._tables: list[jax.Array] = []  # digests, of several tensors each
        self._rows: list[tuple[np.ndarray, int, int]] = []  # (places, their table, the first row in it)

    def views(self, part: list[Rows]) -> list[torch.Tensor]:
        """The views [len(names), ...] of a part. Waits until the part has been computed."""
        made: dict[int, tuple[jax.Array, torch.Tensor]] = {}
        return [self._view(rows, self._held if rows.held else made) for rows in part]

    def _view(self, rows: Rows, seen: dict[int, tuple[jax.Array, torch.Tensor]]) -> torch.Tensor:
        if rows.first is None:
            return torch_view(rows.stack)[None]
        if (key := id(rows.stack)) not in seen:
            seen[key] = rows.stack, by_rows(torch_view(rows.stack))
        return seen[key][1][rows.first : rows.first + len(rows.names)]

    def digest(self, part: list[Rows]) -> None:
        """Start computing the digests of a part, which itself may still be in computation."""
        if alone := [rows for rows in part if rows.first is None]:
            self._add(alone, self._table(tensor_digests([_digestible(rows.stack) for rows in alone])),
                      range(len(alone)))
        stacked = [(rows, rows.first) for rows in part if rows.first is not None]
        made = {id(rows.stack): rows.stack for rows, _ in stacked if not rows.held}
        starts: dict[int, tuple[int, int]] = {}  # id of a stack that is not held -> (table, first row)
        if made:
            table = self._table(stack_digests(*made.values()))
            before = itertools.accumulate(map(_count, made.values()), initial=0)
            starts = {key: (table, start) for key, start in zip(made, before)}
        for rows, first in stacked:
            if (key := id(rows.stack)) not in starts and key not in self._table_of:
                self._table_of[key] = self._table(stack_digests(rows.stack))
            table, start = starts.get(key) or (self._table_of[key], 0)
            self._add([rows], table, [start + first])

    def _table(self, digests: jax.Array) -> int:
        self._tables.append(digests)
        return len(self._tables) - 1

    def _add(self, part: Sequence[Rows], table: int, firsts: Sequence[int]) -> None:
        for rows, first in zip(part, firsts):
            if rows.names not in self._places:
                self._places[rows.names] = np.array([self._place[name] for name in rows.names])
            self._rows.append((self._places[rows.names], table, first))

    def join(self) -> None:
        """Concatenate the digests of all parts on the device, once the last part was digested."""
        self._joined = joined(self._tables) if self._tables else None

    def digests(self) -> np.ndarray:
        """[n, 2] uint32, in the order of places. Raises ValueError for a tensor that the source did not
        give."""
        starts = list(itertools.accumulate(map(len, self._tables), initial=0))
        at = np.full(len(self._place), -1)  # rows in the joined table
        for places, table, first in self._rows:
            at[places] = np.arange(len(places)) + (starts[table] + first)
        if (missing := np.flatnonzero(at < 0)).size:
            raise ValueError(
                f"the source did not give {list(self._place)[missing[0]]}, which its manifest lists")
        return np.asarray(self._joined)[at]


def _digestible(tensor: Any) -> jax.Array:
    return tensor if isinstance(tensor, jax.Array) else torch_words(torch_view(tensor).contiguous())


def _count(stack: jax.Array) -> int:
    """The number of tensors in a stack: of layers, or of layers and experts."""
    return math.prod(stack.shape[: max(stack.ndim - 2, 1)])


def parts(source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[list[Rows]]:
    """The source in parts, each made when it is requested."""
    return source.stacks(PART) if isinstance(source, StackSource) else layers(source, metas)


def layers(source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[list[Rows]]:
    """The source in the order of its manifest, in one list a layer. A list ends at the first tensor of the
    next layer, whose computation has started by then."""
    rows = (_alone(meta, name, buffer) for meta, (name, buffer) in zip(metas, source, strict=True))
    return (_bounded(list(group)) for _, group in itertools.groupby(rows, key=lambda r: layer_of(r.names[0])))


def _bounded(part: list[Rows]) -> list[Rows]:
    """Mark a stack as not held if all its rows are in this layer, such as the layer's experts, since the
    source may have made it for this layer."""
    counts = collections.Counter(id(rows.stack) for rows in part if rows.held)
    whole = {id(rows.stack) for rows in part if rows.held and counts[id(rows.stack)] == _count(rows.stack)}
    return [rows._replace(held=False) if id(rows.stack) in whole else rows for rows in part]


def _alone(meta: ParamMeta, name: str, buffer: Any) -> Rows:
    if name != meta.name:
        manifest.check_tensor(meta, name, str(buffer.dtype), buffer.shape)
    if isinstance(buffer, StackRow) and isinstance(buffer.stack, jax.Array):
        at = np.atleast_1d(buffer.index)
        return Rows((name,), buffer.stack, int(np.ravel_multi_index(at, buffer.stack.shape[: len(at)])), True)
    return Rows((name,), buffer, None, False)
