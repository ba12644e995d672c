"""Memory through which bytes go from a learner to the ranks of an engine.

    shared_memory  a file that both map: for engines on this host
    cuda_ipc       the learner's GPU memory, which the ranks open: for engines on GPUs of this host
    nccl           a buffer on each side, broadcast to all ranks by one group: for engines anywhere
    file           a folder of safetensors that both see

Each process of a learner has two slots (`bridges.vllm_plugin.pieces` says for what). It fills one while the
ranks empty the other. One call of /update_weights brings all: on one host both sides take turns by counters
in shared memory (`bridges.vllm_plugin.turns`), and a broadcast of NCCL waits for all ranks.
"""

from __future__ import annotations

import base64
import functools
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.api import BridgeError, ParamMeta
from bridges.vllm_plugin.pieces import Piece, shape_of

if TYPE_CHECKING:
    import torch

KINDS = "shared_memory", "cuda_ipc", "nccl", "file"
OF_ONE_HOST = "shared_memory", "cuda_ipc"  # by which learner and ranks share slots, and take turns
SLOTS = 2
SLOT_BYTES = 2**28


def as_rows(flat: torch.Tensor, meta: ParamMeta, piece: Piece) -> torch.Tensor:
    """A piece of a uint8 slot as rows [rows, ...] of its tensor; a single number as []."""
    import torch

    found = flat[piece.at : piece.at + piece.nbytes].view(getattr(torch, meta.dtype))
    return found.view(shape_of(piece.cut))


def made(path: Path, slot_bytes: int, count: int) -> np.ndarray:
    """uint8 [count, slot_bytes] in a new file that this user alone can read. Raises BridgeError if there is
    no room for it."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as f:
        try:  # of a file with holes a full disk would be known by SIGBUS
            os.posix_fallocate(f.fileno(), 0, count * slot_bytes)
        except OSError as e:
            path.unlink()
            raise BridgeError(f"{path.parent} has no room for the {count * slot_bytes >> 20} MiB through "
                              f"which weights go: {e.strerror}",
                              "give it more (of a container: --shm-size=1g), or name another folder") from e
        return np.memmap(f, np.uint8, "r+", shape=(count, slot_bytes))


def mapped(path: Path, slot_bytes: int, count: int) -> torch.Tensor:
    """The slots of `made`, in another process, to be read. Raises BridgeError if they are not there."""
    import torch

    try:
        found = np.memmap(path, np.uint8, "r", shape=(count, slot_bytes))
    except (OSError, ValueError) as e:
        raise BridgeError(f"{path}, through which the learner sends, cannot be read here: {e}",
                          "share its folder with the engine, or use kind \"nccl\"") from e
    with warnings.catch_warnings():  # torch warns of memory that is not writable; nothing writes to it
        warnings.simplefilter("ignore")
        return torch.from_numpy(found)


@functools.cache
def lasting_slots(slot_bytes: int, count: int, gpu: int | None = None) -> torch.Tensor:
    """Slots in GPU memory of torch's own (JAX's cannot be shared in part). It never frees what another
    process had open when it died: so all links have the same, for as long as this process lives, and one
    publishes at a time."""
    return gpu_slots(slot_bytes, count, gpu)


def gpu_slots(slot_bytes: int, count: int, gpu: int | None) -> torch.Tensor:
    import torch

    return torch.empty((count, slot_bytes), dtype=torch.uint8, device=gpu_device(gpu))


def gpu_device(gpu: int | None) -> torch.device:
    """GPU number `gpu` of those that this process sees; None: torch's current one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device() if gpu is None else gpu)


def shared_cuda(slot_bytes: int, count: int, gpu: int | None = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Slots, and what another process needs to open them."""
    slots = lasting_slots(slot_bytes, count, gpu)
    _, *rest = slots.untyped_storage()._share_cuda_()
    packed = [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in rest]
    return slots, {"handle": packed, "gpu": gpu_of(slots)}


def opened_cuda(said: dict[str, Any], slot_bytes: int, count: int) -> torch.Tensor:
    """The slots of `shared_cuda`, in another process, on the GPU that they are on. Raises BridgeError if this
    process does not see it."""
    import torch

    here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if said["gpu"] not in here:
        raise BridgeError(f"the learner's buffers are on GPU {said['gpu']}, and this rank sees "
                          f"{', '.join(here)}",
                          'use kind "nccl"')
    index = here.index(said["gpu"])
    handle = [base64.b64decode(x) if isinstance(x, str) else x for x in said["handle"]]
    with torch.cuda.device(index):
        storage = torch.UntypedStorage._new_shared_cuda(index, *handle)
        flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)
    return flat[: count * slot_bytes].view(count, slot_bytes)


def gpu_of(tensor: torch.Tensor) -> str:
    import torch

    return str(torch.cuda.get_device_properties(tensor.device).uuid)

