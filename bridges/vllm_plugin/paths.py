"""The rank's end of each way by which bytes come (`bridges.vllm_plugin.slots`)."""

from __future__ import annotations

import base64
import json
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from bridges.api import BridgeError, ParamMeta
from bridges.vllm_plugin import slots

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
BUCKET_SECONDS = 20.0  # a learner broadcasts a bucket when it asks for its receipt; one that was killed does not


class Path(Protocol):
    """`bucket` gives the uint8 bytes [slot_bytes] of a bucket, which stay as they are until `done`."""

    def bucket(self, k: int) -> torch.Tensor: ...

    def done(self, k: int) -> None: ...

    def close(self) -> None: ...


def opened(kind: str, metas: Sequence[ParamMeta], slot_bytes: int, rank: int, where: dict[str, Any],
           device: torch.device) -> Path:
    """Raises BridgeError for an unknown kind, and for what this process cannot open."""
    if kind == "shared_memory":
        return Slots(slots.mapped(pathlib.Path(where["path"]), slot_bytes))
    if kind == "cuda_ipc":
        return Slots(slots.opened_cuda(where | {"slot_bytes": slot_bytes}))
    if kind == "nccl":
        return Broadcast(where["unique_id"], int(where["world"]), int(where["first_rank"]) + rank, slot_bytes, device)
    if kind == "file":
        return Folder(pathlib.Path(where["folder"]), metas, slots.plan(metas, slot_bytes), slot_bytes)
    raise BridgeError(f"there is no way {kind!r} for weights", f"choose {', '.join(slots.KINDS)}")


class Slots:
    """Slots [SLOTS, slot_bytes] that the learner fills."""

    def __init__(self, found: torch.Tensor):
        self._slots: torch.Tensor | None = found

    def bucket(self, k: int) -> torch.Tensor:
        assert self._slots is not None
        return self._slots[k % slots.SLOTS]

    def done(self, k: int) -> None:
        """Wait until the copies are through: the learner fills the slot once the call is answered."""
        _synchronise(self._slots)

    def close(self) -> None:
        self._slots = None


class Broadcast:
    """A buffer of this rank, into which NCCL broadcasts from the learner, rank 0 of the group."""

    def __init__(self, unique_id: str, world: int, rank: int, slot_bytes: int, device: torch.device):
        import torch

        from bridges.vllm_plugin.nccl import Group

        if device.type != "cuda":
            raise BridgeError(f"NCCL needs GPUs, and the engine is on {device.type}", 'use kind "shared_memory"')
        self._group = Group(base64.b64decode(unique_id), rank, world, device)
        self._buffer = torch.empty(slot_bytes, dtype=torch.uint8, device=device)

    def bucket(self, k: int) -> torch.Tensor:
        self._group.broadcast(self._buffer, time.monotonic() + BUCKET_SECONDS)
        return self._buffer

    def done(self, k: int) -> None:
        _synchronise(self._buffer)

    def close(self) -> None:
        self._group.close()


class Folder:
    """Shards of safetensors that the learner wrote before the first bucket is asked for."""

    def __init__(self, folder: pathlib.Path, metas: Sequence[ParamMeta], plan: list[list[slots.Piece]],
                 slot_bytes: int):
        import torch

        self._folder, self._metas, self._plan = folder, metas, plan
        self._buffer = torch.empty(slot_bytes, dtype=torch.uint8)

    def bucket(self, k: int) -> torch.Tensor:
        places = self._places()
        for piece in self._plan[k]:
            path, start = places[self._metas[piece.tensor].name]
            width = piece.nbytes // piece.rows
            with open(path, "rb") as f:
                f.seek(start + piece.first * width)
                target = self._buffer[piece.at : piece.at + piece.nbytes].numpy()
                if f.readinto(memoryview(target)) != piece.nbytes:
                    raise BridgeError(f"{path} is cut short", "publish again in full")
        return self._buffer

    def _places(self) -> dict[str, tuple[pathlib.Path, int]]:
        """HF name -> (its file, the offset of its bytes). Read again at each bucket: a publish writes new
        files."""
        files = json.loads((self._folder / INDEX).read_text())["weight_map"]
        found = {}
        for file in sorted(set(files.values())):
            path = self._folder / pathlib.Path(file).name
            with open(path, "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
            found |= {name: (path, 8 + size + entry["data_offsets"][0])
                      for name, entry in header.items() if name != "__metadata__"}
        return found

    def done(self, k: int) -> None:
        """The file is read, and copied, when the call is answered."""

    def close(self) -> None:
        """Nothing is held."""


def _synchronise(tensor: torch.Tensor | None) -> None:
    if tensor is not None and tensor.is_cuda:
        import torch

        torch.cuda.synchronize()
