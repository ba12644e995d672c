"""One rank of a served engine: which parts of the learner's tensors it holds, writing them where the kernels
read, and the digests of its live bytes.

It writes as the transport inside one process does (`bridges.inside_vllm`), and knows nothing of the server.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bridges.api import BridgeError, ParamMeta, PublishFailed
from bridges.inside_vllm.kv_scales import check_host, copy_to_host, scale_places
from bridges.inside_vllm.layout import live_rows, packed_copies, scalars
from bridges.inside_vllm.shards import Shard, shard_of
from bridges.inside_vllm.writing import Copies, check_addresses, renew_packed
from bridges.proof import manifest
from bridges.proof.byte_digest import reader
from bridges.vllm_plugin import paths, pieces, slots
from bridges.vllm_plugin.pieces import Piece, as_cut
from bridges.vllm_plugin.turns import Turns

if TYPE_CHECKING:
    import torch


class Move(NamedTuple):
    """Rows of a slot, and their place in the live tensor."""

    meta: ParamMeta
    target: torch.Tensor
    rows: torch.Tensor


class Receiver:
    """The weights of `model`, of which this process is rank `rank` of `ranks`.

    kv_scales: whether a publish may bring the scales of FP8 attention. Raises BridgeError, which names the
    first tensor that cannot be written in place, or whose part it cannot tell.
    """

    def __init__(self, model: torch.nn.Module, rank: int, ranks: int, kv_scales: bool):
        self.rank = rank
        self._kv = scale_places(model) if kv_scales else ()
        rows = live_rows(model)
        self._live = {r.meta.name: r for r in rows + scalars(self._kv)}
        self._shards = {name: shard_of(r.place, ranks) for name, r in self._live.items()}
        self._optional = {p.meta.name for p in self._kv}
        self._whole = list({r.address: r for r in rows}.values())  # one of each parameter
        self._packed = packed_copies(model)
        self._path: paths.Path | None = None
        self._turns: Turns | None = None
        self._read: Callable[[], np.ndarray] | None = None  # the live bytes' digests
        self._expected: np.ndarray | None = None
        self._metas: tuple[ParamMeta, ...] = ()
        self._arrived = 0
        self._copies: dict[tuple[int, int], Copies] = {}

    def describe(self) -> dict[str, Any]:
        """{"rank", "tensors": [[meta, cut, optional], ...]} in the order of the model: what JSON can hold."""
        return {"rank": self.rank, "tensors": [
            [dataclasses.asdict(s.meta), s.cut, name in self._optional] for name, s in self._shards.items()]}

    def connect(self, kind: str, names: Sequence[str], slot_bytes: int, sent: dict[str, Any],
                senders: Sequence[dict[str, Any]], slot_count: int = slots.SLOTS, first_rank: int = 0,
                ranks: int = 1, turns: str = "") -> None:
        """Agree on the order of the tensors and on who sends what (`pieces.packed`), and open the way by
        which it comes from each of the `senders`. first_rank: the number of this engine's first rank among
        the `ranks` of all. turns: the file by which the learner takes turns with the ranks, "" for a way
        that needs none. Raises BridgeError if the names are not those that a publish must bring, or if the way
        cannot be opened."""
        missing = self._shards.keys() - self._optional - set(names)
        if unknown := [n for n in names if n not in self._shards] or sorted(missing):
            raise BridgeError(f"{unknown[0]} is only on one side of the publish",
                              "build both sides from the same config.json and the same precision recipe")
        self._metas = tuple(self._shards[n].meta for n in names)
        self._plan = pieces.plan(self._metas, pieces.unpacked(sent), slot_bytes)
        self._rounds, self._read = max(map(len, self._plan.values())), None
        self.close()
        self._number, self._turns = first_rank + self.rank, Turns.opened(Path(turns)) if turns else None
        self._path = paths.opened(kind, self._metas, self._plan, slot_bytes, slot_count, self._number,
                                  ranks, senders, self._device())

    def _device(self) -> torch.device:
        return next(iter(self._live.values())).parameter.device

    def check(self) -> None:
        """Raise BridgeError if a publish could not be written, while the engine still generates."""
        check_addresses(self._whole)

    def start(self) -> None:
        """A publish begins: nothing of it has arrived."""
        self._arrived, self._expected = 0, None

    def receive(self, buckets: Sequence[int] = (), digests: Mapping[str, str] | None = None) -> None:
        """Write buckets [first, stop) of each sender, each once it is there, or take the digests by rank:
        base64 of [tensors, 2] uint32."""
        if self._path is None:
            raise PublishFailed("no way was opened by which weights can come", "open the transport again")
        first, stop = buckets or (self._arrived, self._arrived)
        if first != self._arrived or not first <= stop <= self._rounds:
            raise PublishFailed(f"buckets {first} to {stop} came, {self._arrived} of {self._rounds} was due",
                                "publish again in full")
        for k in range(first, stop):
            if self._turns:
                self._turns.await_filled(k + 1)
            self._receive(k, self._path)
            self._arrived += 1
            if self._turns:
                self._turns.empty(self._number, self._arrived)
        if digests is not None:
            raw = base64.b64decode(digests[str(self.rank)])
            self._expected = np.frombuffer(raw, "<u4").reshape(len(self._metas), 2)

    def _receive(self, k: int, path: paths.Path) -> None:
        for sender, of_sender in self._plan.items():
            if k < len(of_sender):
                flat = path.bucket(k, sender)
                if (k, sender) not in self._copies:
                    self._copies[k, sender] = copies = Copies()
                    for _, target, rows in self._moves(k, sender, flat):
                        copies.add(target, rows)
                self._copies[k, sender].run()
        path.done()

    def _moves(self, k: int, sender: int, flat: torch.Tensor) -> list[Move]:
        """What bucket k of a sender, whose bytes are in `flat`, brings to this rank."""
        moves = (self._move(piece, flat) for piece in self._plan[sender][k])
        return [move for move in moves if move]

    def _move(self, piece: Piece, flat: torch.Tensor) -> Move | None:
        meta = self._metas[piece.tensor]
        live, cut = self._live[meta.name].tensor, self._shards[meta.name].cut
        rows, found = slots.as_rows(flat, meta, piece), pieces.overlap(piece.cut, cut)
        if not cut:
            return Move(meta, live, rows)
        if not found:
            return None
        return Move(meta, live[pieces.taken(found, cut)], rows[pieces.taken(found, piece.cut)])

    def prove(self) -> None:
        """Renew what is derived from the weights, and compare the live bytes with the learner's digests.

        Raises PublishFailed, which names the tensors.
        """
        if self._expected is None or self._arrived != self._rounds:
            raise PublishFailed(f"{self._arrived} of {self._rounds} buckets have arrived",
                                "publish again in full")
        renew_packed(self._packed)
        copy_to_host(self._kv)
        self.verify()

    def verify(self) -> None:
        """Compare the live bytes with the digests of the last publish. Raises PublishFailed."""
        if self._expected is None:
            raise PublishFailed("nothing was published", "publish first")
        check_host(self._kv)
        if self._read is None:
            self._read = reader([self._live[m.name].tensor for m in self._metas],
                                [m.role != "weight" for m in self._metas])
        found = self._read()
        wrong = np.flatnonzero((found[:, :2] != self._expected).any(1))
        if wrong.size:
            raise PublishFailed(f"{self._metas[wrong[0]].name} differs from what the learner sent "
                                f"({len(wrong)} of {len(self._metas)} tensors differ)",
                                "publish again in full")
        if (bad := np.flatnonzero(found[:, 2])).size:
            raise PublishFailed(f"{self._metas[bad[0]].name} holds a scale that is not positive and finite",
                                "check the learner's weights")

    def close(self) -> None:
        """Let go of the learner's memory."""
        for end in (self._path, self._turns):
            if end is not None:
                end.close()
        self._path = self._turns = None
        self._copies.clear()


def shards_of(description: Mapping[str, Any]) -> dict[str, tuple[Shard, bool]]:
    """HF name -> (shard, whether a publish may leave it out), of what `Receiver.describe` said."""
    return {meta["name"]: (Shard(manifest.meta_of(meta), as_cut(cut)), optional)
            for meta, cut, optional in description["tensors"]}
