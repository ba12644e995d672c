"""A learner process's end of the publishes into served engines: what it sends, bucket by bucket."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridges.api import BridgeError, Cut, ParamMeta, ShardSource, WeightSource
from bridges.proof import manifest
from bridges.proof.byte_digest import place
from bridges.served.ways import Buffer, Way, way
from bridges.vllm_plugin import pieces, slots
from bridges.vllm_plugin.paths import box_name
from bridges.vllm_plugin.pieces import taken


class Outlet:
    """What process `number` of a learner does in a publish. All processes open, meet, begin, fill, send and
    digest in step; the first says when (`bridges.served.served_transport`).

    source: what is published, a whole set or, of several processes, a ShardSource. folder: where files lie,
    for ways that have some. gpu: which of the GPUs that this process sees has the slots, by default torch's
    current one. A learner in JAX names its own: JAX leaves torch's at whichever GPU it used last.
    """

    source: WeightSource

    def __init__(self, number: int = 0, folder: str | Path | None = None, gpu: int | None = None):
        self.number, self._folder, self._gpu = number, folder, gpu
        self._way: Way | None = None

    def held(self) -> pieces.Boxes:
        """By tensor, who holds what. A source that is no ShardSource is the first process's, whole."""
        metas = self.source.manifest()
        return self.source.held() if isinstance(self.source,
                                                ShardSource) else [((0, pieces.whole(m)),) for m in metas]

    def open(self, kind: str, slot_bytes: int, staged_bytes: int,
             cuts: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Work out who sends what, and make the own end of the way -> what the ranks need to open theirs,
        and the digest of the plan. staged_bytes: the memory for slots, of which there are two in any case.
        cuts: those of the ranks, by tensor. Raises BridgeError for an unknown kind, for boxes that do not
        make up a tensor, and for one that cannot be proved."""
        self.close()
        self._metas = self.source.manifest()
        self.sent = pieces.senders_of(self._metas, self.held())
        self.slot_bytes = min(slot_bytes, pieces.room(self._metas, self.sent))
        self._plan = pieces.plan(self._metas, self.sent, self.slot_bytes)
        self.rounds = max(map(len, self._plan.values()))
        self.slots = max(slots.SLOTS, min(self.rounds, staged_bytes // self.slot_bytes))
        self._cuts = [[pieces.as_cut(cut) for cut in of_rank] for of_rank in cuts]
        self._own = [[box for sender, box in parts if sender == self.number] for parts in self.sent]
        self._check()
        said = [manifest.digest(self._metas), pieces.packed(self.sent), self.slot_bytes, self.slots]
        self._way = way(kind, self.slot_bytes, self.slots, self._folder, self._gpu)
        return {"plan": hashlib.sha256(json.dumps(said).encode()).hexdigest()} | self._way.open(self.number)

    def _check(self) -> None:
        found = {(manifest.itemsize(meta), box, of_rank[i]): meta.name for i, meta in enumerate(self._metas)
                 for of_rank in self._cuts for box in self._own[i]}
        for (itemsize, box, cut), name in found.items():
            try:
                place(pieces.overlap(box, cut) or cut, cut, itemsize)
            except ValueError as e:
                raise BridgeError(f"{name}: {e}", "spread the learner over fewer devices, or by rows") from e

    def meet(self, opened: Sequence[dict[str, Any]], ranks: int) -> None:
        """While `ranks` ranks open their ends of what all processes have said."""
        self._opened.meet(self.number, opened, ranks)

    def begin(self) -> bool:
        """A publish begins: nothing of it is sent. The engines may still generate: what can be done now does
        not stop them later. Returns whether all digests are made. Raises what the source raises."""
        self._shares: list[tuple[int, int, int]] = []  # (cut, tensor, which of the way's digests)
        self._opened.begin(self)
        self._stream, self._at, self._ahead, self._noted = self._digested(), (-1, ()), 0, 0
        if not getattr(self.source, "lasting", False):
            return False
        self._stream, self._ahead = iter(list(self._stream)), min(self.rounds, self.slots)
        self._noted = self.rounds if self._opened.notes else self._ahead
        for k in range(self._noted):
            self._fill(k)
        for k in range(self._ahead):
            self._opened.filled(k)
        return True

    def fill(self, k: int) -> None:
        """Bucket k, where this process has one, unless `begin` has filled it. Raises what the source raises,
        and ValueError for a buffer that its manifest or `held` do not name."""
        if k >= self._noted:
            self._fill(k)
        if k >= self._ahead:
            self._opened.filled(k)

    def _fill(self, k: int) -> None:
        plan = self._plan.get(self.number, [])
        for piece in plan[k] if k < len(plan) else ():
            if (piece.tensor, piece.box) != self._at:
                self._buffer, self._at = next(self._stream), (piece.tensor, piece.box)
            self._opened.fill(k, piece, self._buffer)
        if k == self.rounds - 1:
            for _ in self._stream:  # the source is asked for more than its manifest names, and may raise
                pass
            self._buffer = None  # the learner may donate its arrays once its copies are through

    def send(self, k: int) -> None:
        """What goes on beside the call for bucket k: all processes take part in what any sends."""
        self._opened.send(k, [sender for sender, buckets in self._plan.items() if k < len(buckets)])

    def digests(self) -> np.ndarray:
        """The own boxes' share of the digests of what the ranks hold: [cuts, tensors, 2] uint32. All were
        made by `begin`, or by the last `fill`."""
        tables, found = np.zeros((len(self._cuts), len(self._metas), 2), np.uint32), self._opened.digests()
        cut, tensor, which = np.array(self._shares, int).reshape(-1, 3).T
        np.add.at(tables, (cut, tensor), found[which])
        return tables

    def close(self) -> None:
        if self._way is not None:
            self._way.close()
        self._way = None

    @property
    def _opened(self) -> Way:
        if self._way is None:
            raise BridgeError("the way for weights is not open in this process", "open the transport again")
        return self._way

    def manifest(self) -> tuple[ParamMeta, ...]:
        """The boxes that this process sends. Of these it is a WeightSource."""
        return tuple(dataclasses.replace(meta, name=box_name(meta, box), shape=pieces.shape_of(box))
                     for meta, boxes in zip(self._metas, self._own) for box in boxes)

    def __iter__(self) -> Iterator[tuple[str, Buffer]]:
        """(name, buffer) of each, in order, in a form that the way reads."""
        metas = iter(self.manifest())
        for buffers in _buffers(self.source, self._metas, self._own):
            for buffer in buffers:
                meta, view = next(metas), self._opened.view(buffer)
                manifest.check_tensor(meta, meta.name, str(view.dtype).removeprefix("torch."), view.shape)
                yield meta.name, view

    def _digested(self) -> Iterator[Buffer]:
        """The buffers of the boxes, in order, whose digests are made when they are asked for."""
        stream = iter(self)
        for i, boxes in enumerate(self._own):
            for box in boxes:
                _, buffer = next(stream)
                self._digest(i, box, buffer)
                yield buffer
        next(stream, None)  # it may raise

    def _digest(self, i: int, box: Cut, buffer: Buffer) -> None:
        """Have those of the box's part in each cut made, of each part once."""
        made: dict[tuple, int] = {}
        for c, of_rank in enumerate(self._cuts):
            if (part := pieces.overlap(box, of_rank[i])) is not None:
                at = place(part, of_rank[i], manifest.itemsize(self._metas[i]))
                if (part, at) not in made:
                    made[part, at] = self._opened.digest(buffer[taken(part, box)], at)
                self._shares.append((c, i, made[part, at]))


def _buffers(source: WeightSource, metas: Sequence[ParamMeta],
             wanted: list[list[Cut]]) -> Iterator[Sequence[Any]]:
    if isinstance(source, ShardSource):
        yield from source.boxes(wanted)
    elif any(wanted):
        for meta, (name, buffer) in zip(metas, source, strict=True):
            manifest.check_tensor(meta, name, meta.dtype, meta.shape)
            yield [buffer]
