"""The rank's end of each way by which bytes come (`bridges.vllm_plugin.slots`)."""

from __future__ import annotations

import base64
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError, Cut, ParamMeta
from bridges.vllm_plugin import slots
from bridges.vllm_plugin.pieces import Piece, whole

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"


class Path:
    """A rank's end of a way."""

    def bucket(self, k: int, sender: int) -> torch.Tensor:
        """The uint8 bytes [slot_bytes] of a bucket, always at the same address for this k and sender.
        They stay as they are until `done`."""
        raise NotImplementedError

    def done(self) -> None:
        """Wait until the buckets of a round were copied."""

    def close(self) -> None:
        """Let go of what is held."""


def opened(kind: str, metas: Sequence[ParamMeta], plan: dict[int, list[list[Piece]]], slot_bytes: int,
           slot_count: int, number: int, ranks: int, senders: Sequence[dict[str, Any]],
           device: torch.device) -> Path:
    """number: of this rank among the `ranks` of all engines. Raises BridgeError for an unknown kind, and for
    what this process cannot open."""
    if kind == "shared_memory":
        return Slots([slots.mapped(pathlib.Path(s["path"]), slot_bytes, slot_count) for s in senders])
    if kind == "cuda_ipc":
        return Slots([slots.opened_cuda(s, slot_bytes, slot_count) for s in senders])
    if kind == "nccl":
        first = len(senders)
        return Broadcast(senders[0]["unique_id"], first + ranks, first + number, slot_bytes, device)
    if kind == "file":
        return Folder([pathlib.Path(s["folder"]) for s in senders], metas, plan, slot_bytes)
    raise BridgeError(f"there is no way {kind!r} for weights", f"choose {', '.join(slots.KINDS)}")


class Slots(Path):
    """Slots [slot_count, slot_bytes] that each sender fills."""

    def __init__(self, found: list[torch.Tensor]):
        self._slots = found

    def bucket(self, k: int, sender: int) -> torch.Tensor:
        return self._slots[sender][k % len(self._slots[sender])]

    def done(self) -> None:
        """Wait until the copies are through: the learner fills the slots again."""
        _synchronise(self._slots[0])

    def close(self) -> None:
        self._slots = []


class Broadcast(Path):
    """A buffer of this rank, into which NCCL broadcasts from the senders, the first ranks of the group."""

    def __init__(self, unique_id: str, world: int, rank: int, slot_bytes: int, device: torch.device):
        import torch

        from bridges.vllm_plugin.nccl import Group

        self._group = Group(base64.b64decode(unique_id), rank, world, device)
        self._buffer = torch.empty(slot_bytes, dtype=torch.uint8, device=device)

    def bucket(self, k: int, sender: int) -> torch.Tensor:
        self._group.broadcast(self._buffer, sender)
        return self._buffer

    def done(self) -> None:
        _synchronise(self._buffer)

    def close(self) -> None:
        self._group.close()


class Folder(Path):
    """Files of safetensors that each sender wrote to a folder of its own before the first bucket is asked
    for."""

    def __init__(self, folders: Sequence[pathlib.Path], metas: Sequence[ParamMeta],
                 plan: dict[int, list[list[Piece]]], slot_bytes: int):
        import torch

        self._folders, self._metas, self._plan = folders, metas, plan
        self._buffer = torch.empty(slot_bytes, dtype=torch.uint8)

    def bucket(self, k: int, sender: int) -> torch.Tensor:
        found = places(self._folders[sender])
        for piece in self._plan[sender][k]:
            name = box_name(self._metas[piece.tensor], piece.box)
            if name not in found:
                raise BridgeError(f"{self._folders[sender]} has no {name}", "publish again in full")
            path, start = found[name]
            with open(path, "rb") as f:
                f.seek(start + piece.in_box.start)
                target = self._buffer[piece.at : piece.at + piece.nbytes].numpy()
                if f.readinto(memoryview(target)) != piece.nbytes:
                    raise BridgeError(f"{path} is cut short", "publish again in full")
        return self._buffer


def box_name(meta: ParamMeta, box: Cut) -> str:
    """The name of a box in a file: the tensor's if it is all of it, "NAME[0:128, 0:64]" else."""
    cut = ", ".join(f"{start}:{stop}" for start, stop in box)
    return meta.name if box == whole(meta) else f"{meta.name}[{cut}]"


def places(folder: pathlib.Path) -> dict[str, tuple[pathlib.Path, int]]:
    """Name -> (its file, the offset of its bytes). Read again at each bucket: a publish writes new files.
    Raises BridgeError for what cannot be read."""
    found = {}
    try:
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        for path in {folder / pathlib.Path(file).name for file in files.values()}:
            with open(path, "rb") as f:
                size = min(int.from_bytes(f.read(8), "little"), path.stat().st_size)
                header = json.loads(f.read(size))
            found |= {name: (path, 8 + size + int(entry["data_offsets"][0]))
                      for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as e:
        raise BridgeError(f"{folder} cannot be read: {type(e).__name__}: {e}", "publish again in full") from e
    return found


def _synchronise(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize()
