"""Sources of weights that an engine must refuse: a wrong manifest, or tensors that contradict a right one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from bridges.api import ParamMeta, WeightSource

Pair = tuple[str, Any]  # a tensor's name and its buffer
Edit = Callable[[list[ParamMeta]], list[ParamMeta]]
Spoil = Callable[[list[Pair]], Iterator[Pair]]


def _dropped(metas: list[ParamMeta]) -> list[ParamMeta]:
    return metas[1:]


def _added(metas: list[ParamMeta]) -> list[ParamMeta]:
    return [*metas, dataclasses.replace(metas[-1], name="model.unheard_of.weight")]


def _first(**change: Any) -> Edit:
    return lambda metas: [dataclasses.replace(metas[0], **change), *metas[1:]]


MISMATCHES: dict[str, Edit] = {
    "a tensor missing": _dropped,
    "a tensor too many": _added,
    "a tensor renamed": _first(name="model.unheard_of.weight"),
    "another shape": _first(shape=(3, 5)),
    "another dtype": _first(dtype="int8"),
}


def raise_midway(pairs: list[Pair]) -> Iterator[Pair]:
    yield from pairs[: len(pairs) // 2]
    raise ConnectionError("the learner went away")


def end_early(pairs: list[Pair]) -> Iterator[Pair]:
    yield from pairs[:-1]


def wrong_name(pairs: list[Pair]) -> Iterator[Pair]:
    yield from ((name if i else "model.unheard_of.weight", x) for i, (name, x) in enumerate(pairs))


def wrong_shape(pairs: list[Pair]) -> Iterator[Pair]:
    yield from ((name, x if i else x[:-1]) for i, (name, x) in enumerate(pairs))


SPOILED: tuple[Spoil, ...] = (raise_midway, end_early, wrong_name, wrong_shape)


class EditedSource:
    """A source whose manifest goes through `edit` and whose tensors go through `spoil`.

    `read` tells whether anybody asked for a tensor.
    """

    def __init__(self, source: WeightSource, edit: Edit = lambda metas: metas, spoil: Spoil = iter):
        self._source, self._edit, self._spoil, self.read = source, edit, spoil, False

    def manifest(self) -> tuple[ParamMeta, ...]:
        return tuple(self._edit(list(self._source.manifest())))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.read = True
        return self._spoil(list(self._source))
