"""The ways by which a learner process's bytes go to the ranks of served engines: its end of each. The ranks'
is in `bridges.vllm_plugin.paths`."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.api import BridgeError, EngineUnhealthy, WeightSource
from bridges.inside_vllm.writing import Copies
from bridges.proof.byte_digest import host_digest
from bridges.served.background import in_background
from bridges.transports.safetensors_file import host_array, write_folder
from bridges.vllm_plugin import slots
from bridges.vllm_plugin.pieces import Piece

if TYPE_CHECKING:
    import torch

    from bridges.proof.digest_kernel import Region

Buffer = Any  # a box of a tensor of the source: numpy on the host, torch on a GPU


class Way:
    """This process's end of a way. By default the ranks read what lies in its slots or files.

    notes: whether `fill` only notes what `filled` copies, so that it may be called for all buckets ahead.
    """

    notes = False

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

    def filled(self, k: int) -> None:
        """Bucket k is whole: wait for its bytes, and for all digests. The source may drop its buffers."""

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
    notes = True

    def begin(self, own: WeightSource) -> None:
        self._count = 0
        self._copies: dict[int, Copies] = {}  # of each bucket
        self._regions: list[Region] = []  # whose digests are to be made
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
        flat = buffer.contiguous().reshape(-1).view(torch.uint8)[piece.in_box]
        target = self._slots[k % len(self._slots), piece.at : piece.at + piece.nbytes]
        self._copies.setdefault(k, Copies()).add(target, flat)

    def filled(self, k: int) -> None:
        """One program reads all regions of a GPU, and one copies the pieces: a program for each tensor would
        cost the host more time than the GPU."""
        import torch

        self._copies.pop(k, Copies()).run()
        for device in {r.tensor.device for r in self._regions}:
            from bridges.proof.digest_kernel import Regions

            own = [r for r in self._regions if r.tensor.device == device]
            read = Regions([r._replace(row=i) for i, r in enumerate(own)])
            self._found.append(([r.row for r in own], read.read()))
            torch.cuda.synchronize(device)
        if self._slots is not None and self._slots.is_cuda:
            torch.cuda.synchronize(self._slots.device)
        self._regions = []

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
        """Raises EngineUnhealthy if not all come within a minute."""
        import torch

        from bridges.vllm_plugin.nccl import SECONDS, Group

        name, device = base64.b64decode(opened[0]["unique_id"]), slots.gpu_device(self._gpu)
        made = in_background(lambda: Group(name, number, len(opened) + ranks, device))
        try:
            self._number, self._group = number, made.result(SECONDS)
        except TimeoutError as e:
            raise EngineUnhealthy(f"the {ranks} ranks of the engines did not meet by NCCL in {SECONDS:g} s",
                                  "see the engines' logs: can they reach this host?") from e
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
