"""A learner process's end of the publishes into served engines: what it sends, bucket by bucket, and each way
by which that goes to the ranks (`bridges.vllm_plugin.slots`)."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.api import BridgeError, Cut, ParamMeta, ShardSource, WeightSource
from bridges.proof import manifest
from bridges.proof.byte_digest import host_digest, place
from bridges.served.background import in_background
from bridges.transports.safetensors_file import host_array, write_folder
from bridges.vllm_plugin import pieces, slots
from bridges.vllm_plugin.paths import box_name
from bridges.vllm_plugin.pieces import Piece, taken

if TYPE_CHECKING:
    import torch

    from bridges.proof.digest_kernel import Region

Buffer = Any  # a box of a tensor of the source: numpy on the host, torch on a GPU


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
        self._stream, self._at, self._ahead = self._digested(), (-1, ()), 0
        if not getattr(self.source, "lasting", False):
            return False
        self._stream, self._ahead = iter(list(self._stream)), min(self.rounds, self.slots)
        for k in range(self._ahead):
            self._fill(k)
        self._opened.filled()
        return True

    def fill(self, k: int) -> None:
        """Bucket k, where this process has one, unless `begin` has filled it. Raises what the source raises,
        and ValueError for a buffer that its manifest or `held` do not name."""
        if k >= self._ahead:
            self._fill(k)
            self._opened.filled()

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


class Way:
    """This process's end of a way. By default the ranks read what lies in its slots or files."""

    def open(self, number: int) -> dict[str, Any]:
        """What the ranks need to open their ends."""
        raise NotImplementedError

    def meet(self, number: int, opened: Sequence[dict[str, Any]], ranks: int) -> None:
        """While they do."""

    def begin(self, own: WeightSource) -> None:
        """Before the first bucket. No digest has been made."""

    def view(self, buffer: Any) -> Buffer:
        """A buffer of the source, in a form that `digest` and `fill` read."""
        raise NotImplementedError

    def digest(self, buffer: Buffer, at: tuple[int, int]) -> int:
        """Have a digest made by `filled`, and say its row in `digests`."""
        raise NotImplementedError

    def fill(self, k: int, piece: Piece, buffer: Buffer) -> None:
        """Put a piece into bucket k, by `filled`."""

    def filled(self) -> None:
        """A bucket is whole: wait for its bytes and its digests. The source may drop its buffers."""

    def digests(self) -> np.ndarray:
        """All since `begin`: [n, 2] uint32."""
        raise NotImplementedError

    def send(self, k: int, senders: Sequence[int]) -> None:
        """What goes on beside the call for bucket k, of `senders`."""

    def close(self) -> None:
        """Let go of what is held."""


def way(kind: str, slot_bytes: int, count: int = slots.SLOTS, folder: str | Path | None = None,
        gpu: int | None = None) -> Way:
    """count: of its slots. gpu: that has them, as in `Outlet`. Raises BridgeError for an unknown kind."""
    makers = {"shared_memory": lambda: SharedMemory(slot_bytes, count, folder),
              "cuda_ipc": lambda: CudaIpc(slot_bytes, count, gpu),
              "nccl": lambda: Nccl(slot_bytes, count, gpu), "file": lambda: File(folder)}
    if kind not in makers:
        raise BridgeError(f"there is no way {kind!r} for weights", f"choose {', '.join(makers)}")
    return makers[kind]()


def place_of(folder: str | Path | None) -> Path:
    """The folder for what engines of this host read: memory, where the host has a file system for it."""
    shm = Path("/dev/shm")
    return Path(folder) if folder else shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class _OfHost(Way):
    """Boxes in the host's memory."""

    def begin(self, own: WeightSource) -> None:
        self._digests: list[np.ndarray] = []

    def view(self, buffer: Any) -> np.ndarray:
        return host_array(buffer)

    def digest(self, buffer: np.ndarray, at: tuple[int, int]) -> int:
        self._digests.append(host_digest(buffer, at))
        return len(self._digests) - 1

    def digests(self) -> np.ndarray:
        return np.array(self._digests, np.uint32).reshape(-1, 2)


class _OfGpu(Way):
    """Boxes in the memory of this process's GPUs, without a copy, and slots in that of one."""

    _slots: torch.Tensor | None

    def begin(self, own: WeightSource) -> None:
        self._count, self._kept = 0, []
        self._regions: list[Region] = []  # of the bucket that is being filled
        self._found: list[tuple[list[int], torch.Tensor]] = []

    def view(self, buffer: Any) -> torch.Tensor:
        from bridges.sources.dlpack import torch_view

        return torch_view(buffer)

    def digest(self, buffer: torch.Tensor, at: tuple[int, int]) -> int:
        from bridges.proof.digest_kernel import Region

        self._regions.append(Region(buffer.contiguous(), self._count, at))
        self._count += 1
        return self._count - 1

    def fill(self, k: int, piece: Piece, buffer: torch.Tensor) -> None:
        import torch

        assert self._slots is not None
        flat = buffer.contiguous().reshape(-1).view(torch.uint8)
        self._slots[k % len(self._slots), piece.at : piece.at + piece.nbytes] = flat[piece.in_box]
        self._kept.append(flat)

    def filled(self) -> None:
        """One program reads all regions of a GPU: a program for each tensor would cost the host more time
        than the GPU."""
        import torch

        from bridges.proof.digest_kernel import Regions

        for device in {r.tensor.device for r in self._regions}:
            own = [r for r in self._regions if r.tensor.device == device]
            read = Regions([r._replace(row=i) for i, r in enumerate(own)])
            self._found.append(([r.row for r in own], read.read()))
            torch.cuda.synchronize(device)
        torch.cuda.synchronize()
        self._regions, self._kept = [], []

    def digests(self) -> np.ndarray:
        table = np.zeros((self._count, 2), np.uint32)
        for rows, found in self._found:
            table[rows] = found.cpu().numpy().view(np.uint32)[:, :2]
        return table


class SharedMemory(_OfHost):
    """A file that the ranks map. It has no name any more once they have."""

    def __init__(self, slot_bytes: int, count: int, folder: str | Path | None):
        self._path = place_of(folder) / f"jaxfp8rl-{secrets.token_hex(8)}"
        self._slots: np.ndarray | None = slots.made(self._path, slot_bytes, count)

    def open(self, number: int) -> dict[str, Any]:
        return {"path": str(self._path)}

    def begin(self, own: WeightSource) -> None:
        super().begin(own)
        self._path.unlink(missing_ok=True)

    def fill(self, k: int, piece: Piece, buffer: np.ndarray) -> None:
        assert self._slots is not None
        flat = buffer.reshape(-1).view(np.uint8)
        self._slots[k % len(self._slots), piece.at : piece.at + piece.nbytes] = flat[piece.in_box]

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._slots = None


class CudaIpc(_OfGpu):
    """Slots that the ranks open. All transports of a process share them."""

    def __init__(self, slot_bytes: int, count: int, gpu: int | None):
        self._slots, self._said = slots.shared_cuda(slot_bytes, count, gpu)

    def open(self, number: int) -> dict[str, Any]:
        return self._said

    def close(self) -> None:
        self._slots = None


class Nccl(_OfGpu):
    """Slots that are broadcast to all ranks of all engines. The other processes get them, too, and do not
    read them."""

    def __init__(self, slot_bytes: int, count: int, gpu: int | None):
        self._shape, self._group, self._gpu = (count, slot_bytes), None, gpu

    def open(self, number: int) -> dict[str, Any]:
        from bridges.vllm_plugin.nccl import unique_id

        return {"unique_id": base64.b64encode(unique_id()).decode()} if number == 0 else {}

    def meet(self, number: int, opened: Sequence[dict[str, Any]], ranks: int) -> None:
        """Raises TimeoutError if not all come within a minute."""
        import torch

        from bridges.vllm_plugin.nccl import SECONDS, Group

        name, device = base64.b64decode(opened[0]["unique_id"]), slots.gpu_device(self._gpu)
        made = in_background(lambda: Group(name, number, len(opened) + ranks, device))
        self._number, self._group = number, made.result(SECONDS)
        self._slots = torch.empty(self._shape, dtype=torch.uint8, device=device)
        self._others = torch.empty_like(self._slots[0]) if len(opened) > 1 else None

    def send(self, k: int, senders: Sequence[int]) -> None:
        assert self._group is not None and self._slots is not None
        for sender in senders:
            buffer = self._slots[k % len(self._slots)] if sender == self._number else self._others
            self._group.broadcast(buffer, sender)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = self._slots = None


class File(_OfHost):
    """A folder of safetensors, written before the first bucket: the slowest way, whose bytes any tool can
    check."""

    def __init__(self, folder: str | Path | None):
        self._folder = Path(tempfile.mkdtemp(prefix="jaxfp8rl-weights-", dir=place_of(folder)))

    def open(self, number: int) -> dict[str, Any]:
        return {"folder": str(self._folder / "weights")}

    def begin(self, own: WeightSource) -> None:
        super().begin(own)
        shutil.rmtree(self._folder / "weights", ignore_errors=True)
        write_folder(own, self._folder / "weights", 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)
