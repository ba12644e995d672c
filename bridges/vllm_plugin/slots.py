"""Memory through which bytes go from a learner to the ranks of an engine, and the order in which they go.

    shared_memory  a file that both map: for engines on this host
    cuda_ipc       the learner's GPU memory, which the ranks open: for engines on GPUs of this host
    nccl           a buffer on each side, broadcast to all ranks by one group: for engines anywhere
    file           a folder of safetensors that both see

The tensors are packed into buckets, whole rows each. Both sides work out the same plan. The learner fills one
slot while the ranks empty the other; each bucket is one call of /update_weights.
"""

from __future__ import annotations

import base64
import functools
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bridges.api import BridgeError, ParamMeta
from bridges.proof import manifest

if TYPE_CHECKING:
    import torch

KINDS = "shared_memory", "cuda_ipc", "nccl", "file"
SLOTS = 2
SLOT_BYTES = 2**28
ALIGN = 256  # bytes: every piece begins where the fastest copies can


class Piece(NamedTuple):
    """Rows [first, first + rows) of a tensor, which lie at byte `at` of a slot. A single number is one
    row."""

    tensor: int
    first: int
    rows: int
    at: int
    nbytes: int


def plan(metas: Sequence[ParamMeta], slot_bytes: int) -> list[list[Piece]]:
    """The pieces of all tensors, bucket by bucket. Raises BridgeError if a row does not fit into a slot."""
    buckets, at = [[]], 0
    for i, meta in enumerate(metas):
        first, rows = 0, meta.shape[0] if meta.shape else 1
        width = manifest.nbytes([meta]) // max(rows, 1)
        if width > slot_bytes:
            raise BridgeError(f"{meta.name}: a row of {width} bytes does not fit into a slot of {slot_bytes}",
                              "use larger slots")
        while first < rows:
            at = -(-at // ALIGN) * ALIGN
            take = min(rows - first, (slot_bytes - at) // width)
            if take < 1:
                buckets.append([])
                at = 0
                continue
            buckets[-1].append(Piece(i, first, take, at, take * width))
            first, at = first + take, at + take * width
    return buckets


def room(metas: Sequence[ParamMeta]) -> int:
    """The bytes of a slot that holds all tensors."""
    return sum(-(-manifest.nbytes([m]) // ALIGN) * ALIGN for m in metas)


def as_rows(flat: torch.Tensor, meta: ParamMeta, piece: Piece) -> torch.Tensor:
    """A piece of a uint8 slot as rows [rows, ...] of its tensor; a single number as []."""
    import torch

    found = flat[piece.at : piece.at + piece.nbytes].view(getattr(torch, meta.dtype))
    return found.view(piece.rows, *meta.shape[1:]) if meta.shape else found.view(())


def made(path: Path, slot_bytes: int) -> np.ndarray:
    """uint8 [SLOTS, slot_bytes] in a new file that this user alone can read."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as f:
        # of a file with holes a full disk would be known by SIGBUS
        os.posix_fallocate(f.fileno(), 0, SLOTS * slot_bytes)
        return np.memmap(f, np.uint8, "r+", shape=(SLOTS, slot_bytes))


def mapped(path: Path, slot_bytes: int) -> torch.Tensor:
    """The slots of `made`, in another process, to be read. Raises BridgeError if they are not there."""
    import torch

    try:
        found = np.memmap(path, np.uint8, "r", shape=(SLOTS, slot_bytes))
    except (OSError, ValueError) as e:
        raise BridgeError(f"{path}, through which the learner sends, cannot be read here: {e}",
                          "share its folder with the engine, or use kind \"nccl\"") from e
    with warnings.catch_warnings():  # torch warns of memory that is not writable; nothing writes to it
        warnings.simplefilter("ignore")
        return torch.from_numpy(found)


@functools.cache
def lasting_slots(slot_bytes: int) -> torch.Tensor:
    """Slots in GPU memory of torch's own (JAX's cannot be shared in part). It never frees what another
    process had open when it died: so all links have the same, for as long as this process lives, and one
    publishes at a time."""
    return gpu_slots(slot_bytes)


def gpu_slots(slot_bytes: int) -> torch.Tensor:
    import torch

    return torch.empty((SLOTS, slot_bytes), dtype=torch.uint8, device="cuda")


def shared_cuda(slot_bytes: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Slots, and what another process needs to open them."""
    slots = lasting_slots(slot_bytes)
    _, *rest = slots.untyped_storage()._share_cuda_()
    packed = [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in rest]
    return slots, {"handle": packed, "gpu": gpu_of(slots)}


def opened_cuda(said: dict[str, Any]) -> torch.Tensor:
    """The learner's slots, on the GPU that they are on. Raises BridgeError if this process does not see
    it."""
    import torch

    here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if said["gpu"] not in here:
        raise BridgeError(f"the learner's buffers are on GPU {said['gpu']}, and this rank sees {', '.join(here)}",
                          'use kind "nccl"')
    index = here.index(said["gpu"])
    handle = [base64.b64decode(x) if isinstance(x, str) else x for x in said["handle"]]
    with torch.cuda.device(index):
        storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
        flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
    return flat[: SLOTS * int(said["slot_bytes"])].view(SLOTS, -1)


def gpu_of(tensor: torch.Tensor) -> str:
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid)


def host_bytes(array: np.ndarray, piece: Piece) -> np.ndarray:
    """The bytes of a piece in its row-major tensor."""
    width = piece.nbytes // piece.rows
    flat = array.reshape(-1).view(np.uint8)
    return flat[piece.first * width : piece.first * width + piece.nbytes]
