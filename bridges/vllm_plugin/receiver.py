"""One rank of a served engine: which parts of the learner's tensors it holds, writing them where the kernels
read, and the digests of its live bytes.

It writes as the transport inside one process does (`bridges.inside_vllm`), and knows nothing of the server.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.api import BridgeError, ParamMeta, PublishFailed
from bridges.inside_vllm.kv_scales import check_host, copy_to_host, scale_places
from bridges.inside_vllm.layout import LiveRows, live_rows, packed_copies, scalars
from bridges.inside_vllm.shards import Shard, shard_of
from bridges.inside_vllm.writing import check_addresses, copy_rows, renew_packed
from bridges.proof import manifest
from bridges.proof.byte_digest import digest_of, unsound
from bridges.vllm_plugin import paths, pieces, slots
from bridges.vllm_plugin.pieces import Piece, as_cut

if TYPE_CHECKING:
    import torch

BLOCK = (128, 128)


class Receiver:
    """The weights of `model`, of which this process is rank `rank` of `ranks`.

    kv_scales: whether a publish may bring the scales of FP8 attention. Raises BridgeError, which names the
    first tensor that cannot be written in place, or whose part it cannot tell.
    """

    def __init__(self, model: torch.nn.Module, rank: int, ranks: int, kv_scales: bool):
        self.rank = rank
        self._kv = scale_places(model) if kv_scales else ()
        rows = live_rows(model, BLOCK)
        self._live = {r.meta.name: r for r in rows + scalars(self._kv)}
        self._shards = {name: shard_of(r.place, ranks) for name, r in self._live.items()}
        self._optional = {p.meta.name for p in self._kv}
        self._whole = list({r.address: r for r in rows}.values())  # one of each parameter
        self._packed = packed_copies(model)
        self._path: paths.Path | None = None
        self._expected: np.ndarray | None = None
        self._metas: tuple[ParamMeta, ...] = ()
        self._arrived = 0

    def describe(self) -> dict[str, Any]:
        """{"rank", "tensors": [[meta, cut, optional], ...]} in the order of the model: what JSON can hold."""
        return {"rank": self.rank, "tensors": [
            [dataclasses.asdict(s.meta), s.cut, name in self._optional] for name, s in self._shards.items()]}

    def connect(self, kind: str, names: Sequence[str], slot_bytes: int, sent: dict[str, Any],
                senders: Sequence[dict[str, Any]], **where: Any) -> None:
        """Agree on the order of the tensors and on who sends what (`pieces.packed`), and open the way by
        which it comes from each of the `senders`. Raises BridgeError if the names are not those that a
        publish must bring, or if the way cannot be opened."""
        missing = self._shards.keys() - self._optional - set(names)
        if unknown := [n for n in names if n not in self._shards] or sorted(missing):
            raise BridgeError(f"{unknown[0]} is only on one side of the publish",
                              "build both sides from the same config.json and the same precision recipe")
        self._metas = tuple(self._shards[n].meta for n in names)
        self._plan = pieces.plan(self._metas, pieces.unpacked(sent), slot_bytes)
        self._rounds = max(map(len, self._plan.values()))
        self.close()
        self._path = paths.opened(kind, self._metas, self._plan, slot_bytes, self.rank, senders, where,
                                  self._device())

    def _device(self) -> torch.device:
        return next(iter(self._live.values())).parameter.device

    def start(self) -> None:
        """A publish begins: nothing of it has arrived."""
        check_addresses(self._whole)
        self._arrived, self._expected = 0, None

    def receive(self, bucket: int, digests: Mapping[str, str] | None = None) -> None:
        """Write a bucket of each sender. With the last ones come the digests by rank, base64 of [tensors, 2]
        uint32."""
        if self._path is None:
            raise PublishFailed("no way was opened by which weights can come", "open the transport again")
        if bucket != self._arrived or bucket >= self._rounds:
            raise PublishFailed(f"bucket {bucket} came, {self._arrived} of {self._rounds} was due",
                                "publish again in full")
        for sender, buckets in self._plan.items():
            if bucket < len(buckets):
                flat = self._path.bucket(bucket, sender)
                for piece in buckets[bucket]:
                    self._write(piece, flat)
                self._path.done()
        self._arrived += 1
        if digests is not None:
            raw = base64.b64decode(digests[str(self.rank)])
            self._expected = np.frombuffer(raw, "<u4").reshape(len(self._metas), 2)

    def _write(self, piece: Piece, flat: torch.Tensor) -> None:
        meta = self._metas[piece.tensor]
        live, cut = self._live[meta.name].tensor, self._shards[meta.name].cut
        rows, found = slots.as_rows(flat, meta, piece), pieces.overlap(piece.cut, cut)
        if not cut:
            live.copy_(rows)
        elif found:
            copy_rows(live[pieces.taken(found, cut)], rows[pieces.taken(found, piece.cut)])

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
        wrong = [meta.name for meta, want in zip(self._metas, self._expected)
                 if (digest_of(self._live[meta.name].tensor) != want).any()]
        if wrong:
            raise PublishFailed(f"{wrong[0]} differs from what the learner sent "
                                f"({len(wrong)} of {len(self._metas)} tensors differ)",
                                "publish again in full")
        if bad := [r.meta.name for r in self._scales() if unsound(r.tensor)]:
            raise PublishFailed(f"{bad[0]} holds a scale that is not positive and finite",
                                "check the learner's weights")

    def _scales(self) -> list[LiveRows]:
        return [self._live[m.name] for m in self._metas if m.role != "weight"]

    def close(self) -> None:
        """Let go of the learner's memory."""
        if self._path is not None:
            self._path.close()
        self._path = None


def shards_of(description: Mapping[str, Any]) -> dict[str, tuple[Shard, bool]]:
    """HF name -> (shard, whether a publish may leave it out), of what `Receiver.describe` said."""
    return {meta["name"]: (Shard(manifest.meta_of(meta), as_cut(cut)), optional)
            for meta, cut, optional in description["tensors"]}
