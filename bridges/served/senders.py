"""The learner's end of each way by which bytes go to the ranks of served engines
(`bridges.vllm_plugin.slots`)."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bridges.api import BridgeError, ParamMeta, WeightSource
from bridges.proof import manifest
from bridges.proof.byte_digest import digest_of, host_digest
from bridges.served.background import together
from bridges.transports.safetensors_file import host_array, write_folder
from bridges.vllm_plugin import slots
from bridges.vllm_plugin.slots import Piece

if TYPE_CHECKING:
    import torch

Buffer = Any  # a tensor of the source: numpy on the host, torch on a GPU


class Sender(Protocol):
    """connect: `accept` has the ranks open their end, of {"kind", ...}. tensors: the source's tensors, in a
    form that `digest` and `fill` read. send: what goes on beside the call for bucket k."""

    slot_bytes: int

    def connect(self, accept: Callable[[dict[str, Any]], None], ranks: int) -> None: ...

    def tensors(self, source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[Buffer]: ...

    def digest(self, tensor: Buffer) -> np.ndarray: ...

    def fill(self, k: int, piece: Piece, tensor: Buffer) -> None: ...

    def send(self, k: int) -> None: ...

    def close(self) -> None: ...


def sender(kind: str, slot_bytes: int, folder: str | Path | None) -> Sender:
    """Raises BridgeError for an unknown kind."""
    makers = {"shared_memory": lambda: SharedMemory(slot_bytes, folder), "cuda_ipc": lambda: CudaIpc(slot_bytes),
              "nccl": lambda: Nccl(slot_bytes), "file": lambda: File(slot_bytes, folder)}
    if kind not in makers:
        raise BridgeError(f"there is no way {kind!r} for weights", f"choose {', '.join(makers)}")
    return makers[kind]()


def place(folder: str | Path | None) -> Path:
    """The folder for what engines of this host read: memory, where the host has a file system for it."""
    shm = Path("/dev/shm")
    return Path(folder) if folder else shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class _OfHost:
    """Tensors in the host's memory."""

    def tensors(self, source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[np.ndarray]:
        for meta, (name, buffer) in zip(metas, source, strict=True):
            array = host_array(buffer)
            manifest.check_tensor(meta, name, array.dtype.name, array.shape)
            yield array

    def digest(self, tensor: np.ndarray) -> np.ndarray:
        return host_digest(tensor)


class _OfGpu:
    """Tensors in a GPU's memory, without a copy."""

    def tensors(self, source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[torch.Tensor]:
        from bridges.sources.dlpack import torch_view

        for meta, (name, buffer) in zip(metas, source, strict=True):
            view = torch_view(buffer)
            manifest.check_tensor(meta, name, str(view.dtype).removeprefix("torch."), view.shape)
            yield view

    def digest(self, tensor: torch.Tensor) -> np.ndarray:
        return digest_of(tensor.contiguous())


class SharedMemory(_OfHost):
    """A file that the ranks map. It has no name any more once they have."""

    def __init__(self, slot_bytes: int, folder: str | Path | None):
        self.slot_bytes, self._folder = slot_bytes, folder
        self._slots: np.ndarray | None = None

    def connect(self, accept: Callable[[dict[str, Any]], None], ranks: int) -> None:
        path = place(self._folder) / f"jaxfp8rl-{secrets.token_hex(8)}"
        try:
            self._slots = slots.made(path, self.slot_bytes)
            accept({"kind": "shared_memory", "path": str(path)})
        finally:
            path.unlink(missing_ok=True)

    def fill(self, k: int, piece: Piece, tensor: np.ndarray) -> None:
        assert self._slots is not None
        self._slots[k % slots.SLOTS, piece.at : piece.at + piece.nbytes] = slots.host_bytes(tensor, piece)

    def send(self, k: int) -> None:
        """The ranks read the slot where it lies."""

    def close(self) -> None:
        self._slots = None


class CudaIpc(_OfGpu):
    """Slots in this process's GPU memory, which the ranks open. All transports of a process share them."""

    def __init__(self, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self._slots: torch.Tensor | None = None

    def connect(self, accept: Callable[[dict[str, Any]], None], ranks: int) -> None:
        self._slots, said = slots.shared_cuda(self.slot_bytes)
        accept({"kind": "cuda_ipc"} | said)

    def fill(self, k: int, piece: Piece, tensor: torch.Tensor) -> None:
        assert self._slots is not None
        _copy(self._slots[k % slots.SLOTS], piece, tensor)

    def send(self, k: int) -> None:
        """The ranks read the slot where it lies."""

    def close(self) -> None:
        self._slots = None


class Nccl(_OfGpu):
    """Slots in this process's GPU memory, broadcast to all ranks of all engines."""

    SECONDS = 60.0

    def __init__(self, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self._group: Any = None

    def connect(self, accept: Callable[[dict[str, Any]], None], ranks: int) -> None:
        import torch

        from bridges.vllm_plugin.nccl import Group, unique_id

        self.close()
        name = unique_id()
        said = {"kind": "nccl", "unique_id": base64.b64encode(name).decode(), "world": ranks + 1}
        device = torch.device("cuda", torch.cuda.current_device())
        self._group = together(lambda: Group(name, 0, ranks + 1, device), lambda: accept(said))
        self._slots = torch.empty((slots.SLOTS, self.slot_bytes), dtype=torch.uint8, device=device)

    def fill(self, k: int, piece: Piece, tensor: torch.Tensor) -> None:
        _copy(self._slots[k % slots.SLOTS], piece, tensor)

    def send(self, k: int) -> None:
        self._group.broadcast(self._slots[k % slots.SLOTS], time.monotonic() + self.SECONDS)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None


class File(_OfHost):
    """A folder of safetensors, written before the first bucket: the slowest way, whose bytes any tool can
    check."""

    def __init__(self, slot_bytes: int, folder: str | Path | None):
        self.slot_bytes = slot_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="jaxfp8rl-weights-", dir=place(folder)))

    def connect(self, accept: Callable[[dict[str, Any]], None], ranks: int) -> None:
        accept({"kind": "file", "folder": str(self._folder / "weights")})

    def tensors(self, source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[np.ndarray]:
        shutil.rmtree(self._folder / "weights", ignore_errors=True)
        write_folder(source, self._folder / "weights", 0)
        return super().tensors(source, metas)

    def fill(self, k: int, piece: Piece, tensor: np.ndarray) -> None:
        """The ranks read the file."""

    def send(self, k: int) -> None:
        """The ranks read the file."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(self._folder)


def _copy(slot: torch.Tensor, piece: Piece, tensor: torch.Tensor) -> None:
    import torch

    width = piece.nbytes // piece.rows
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    slot[piece.at : piece.at + piece.nbytes] = flat[piece.first * width : piece.first * width + piece.nbytes]
    torch.cuda.current_stream().synchronize()  # the source may drop the tensor
