"""Who sends which part of a tensor, and in which order: pure functions, which both sides compute.

A process of a learner holds boxes of the tensors (a `Cut` of each). Of equal boxes one is sent. Each sender
packs its boxes into buckets, whole rows each. In round k the ranks take bucket k of each sender, and write
of each piece whatever lies in their own cuts. A learner of one process is the case of one sender.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from bridges.api import BridgeError, Cut, ParamMeta
from bridges.proof import manifest

ALIGN = 256  # bytes: every piece begins where the fastest copies can
Boxes = Sequence[Sequence[tuple[int, Cut]]]  # by tensor: (process, what it holds or sends)


class Piece(NamedTuple):
    """Rows [first, first + rows) of the tensor within `box`, row-major at byte `at` of its sender's slot. A
    single number is one row of an empty box."""

    tensor: int
    box: Cut
    first: int
    rows: int
    at: int
    nbytes: int

    @property
    def cut(self) -> Cut:
        return ((self.first, self.first + self.rows), *self.box[1:]) if self.box else ()

    @property
    def in_box(self) -> slice:
        """The place of its bytes among those of the box."""
        start = (self.first - (self.box[0][0] if self.box else 0)) * self.nbytes // self.rows
        return slice(start, start + self.nbytes)


def whole(meta: ParamMeta) -> Cut:
    return tuple((0, n) for n in meta.shape)


def shape_of(cut: Cut) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in cut)


def taken(cut: Cut, origin: Cut = ()) -> Any:
    """The index of a cut in an array that begins at `origin`: `whole[taken(cut)]`."""
    firsts = (first for first, _ in origin or ((0, 0),) * len(cut))
    return tuple(slice(start - first, stop - first) for (start, stop), first in zip(cut, firsts))


def overlap(a: Cut, b: Cut) -> Cut | None:
    """What two cuts of a tensor have in common, None if that is nothing."""
    found = tuple((max(x, y), min(z, w)) for (x, z), (y, w) in zip(a, b))
    return None if any(start >= stop for start, stop in found) else found


def senders_of(metas: Sequence[ParamMeta], held: Boxes) -> list[list[tuple[int, Cut]]]:
    """By tensor: its boxes, each with one sender, which holds it. The processes send about equally many
    bytes. Raises BridgeError for boxes that overlap, or that do not make up the tensor."""
    sent: dict[int, int] = {}
    found = []
    for meta, parts in zip(metas, held, strict=True):
        holders: dict[Cut, list[int]] = {}
        for process, box in parts:
            holders.setdefault(box, []).append(process)
        _check(meta, list(holders))
        found.append([])
        for box, processes in holders.items():
            sender = min(processes, key=lambda p: (sent.get(p, 0), p))
            sent[sender] = sent.get(sender, 0) + _nbytes(meta, box)
            found[-1].append((sender, box))
    return found


def _check(meta: ParamMeta, boxes: list[Cut]) -> None:
    apart = all(overlap(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    if not apart or sum(math.prod(shape_of(b)) for b in boxes) != math.prod(meta.shape):
        raise BridgeError(f"{meta.name} {meta.shape}: the learner's processes hold {boxes}, which do "
                          f"not make it up",
                          "give all processes the same mesh")


def _nbytes(meta: ParamMeta, box: Cut) -> int:
    return math.prod(shape_of(box)) * manifest.itemsize(meta)


def plan(metas: Sequence[ParamMeta], sent: Boxes, slot_bytes: int) -> dict[int, list[list[Piece]]]:
    """By sender: the pieces of its boxes, bucket by bucket. Raises BridgeError if a row does not fit into a
    slot."""
    boxes: dict[int, list[tuple[int, Cut]]] = {}
    for i, parts in enumerate(sent):
        for sender, box in parts:
            boxes.setdefault(sender, []).append((i, box))
    return {sender: _packed(metas, boxes[sender], slot_bytes) for sender in sorted(boxes)}


def _packed(metas: Sequence[ParamMeta], boxes: list[tuple[int, Cut]], slot_bytes: int) -> list[list[Piece]]:
    buckets, at = [[]], 0
    for i, box in boxes:
        (first, stop), *_ = box or ((0, 1),)
        width = _nbytes(metas[i], box) // max(stop - first, 1)
        if width > slot_bytes:
            raise BridgeError(f"{metas[i].name}: a row of {width} bytes does not fit into a slot "
                              f"of {slot_bytes}",
                              "use larger slots")
        while first < stop:
            at = _aligned(at)
            take = min(stop - first, (slot_bytes - at) // width)
            if take < 1:
                buckets.append([])
                at = 0
                continue
            buckets[-1].append(Piece(i, box, first, take, at, take * width))
            first, at = first + take, at + take * width
    return buckets


def room(metas: Sequence[ParamMeta], sent: Boxes) -> int:
    """The bytes of a slot that holds all that any one process sends."""
    sizes: dict[int, int] = {}
    for meta, parts in zip(metas, sent):
        for sender, box in parts:
            sizes[sender] = sizes.get(sender, 0) + _aligned(_nbytes(meta, box))
    return max(sizes.values(), default=0)


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def packed(sent: Boxes) -> dict[str, Any]:
    """`sent` for JSON, equal layouts once."""
    layouts: dict[tuple, int] = {}
    of = [layouts.setdefault(tuple(parts), len(layouts)) for parts in sent]
    return {"layouts": list(layouts), "of": of}


def unpacked(said: dict[str, Any]) -> list[list[tuple[int, Cut]]]:
    layouts = [[(sender, as_cut(box)) for sender, box in parts] for parts in said["layouts"]]
    return [layouts[i] for i in said["of"]]


def as_cut(said: Any) -> Cut:
    """A cut that JSON has made lists of."""
    return tuple((start, stop) for start, stop in said)
