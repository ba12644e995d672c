"""One NCCL group of a learner's processes, the first ranks, and all ranks of all engines. They meet by a
unique id, so no port is chosen and nothing is pickled. The library is the one that vLLM loads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bridges.api import BridgeError, EngineUnhealthy

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 1e-3
# in which all ranks meet, and all come to a broadcast: meanwhile the learner makes a bucket
SECONDS = 60.0


def unique_id() -> bytes:
    """A new id. Its 128 bytes go to every rank."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


class Group:
    """A rank's end. All ranks enter at once: the constructor returns when they have met. Raises BridgeError
    for a device that is no GPU."""

    def __init__(self, unique_id: bytes, rank: int, world: int, device: torch.device):
        if device.type != "cuda":
            raise BridgeError(f"NCCL needs GPUs, and this process computes on {device.type}",
                              'use kind "shared_memory"')
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self._group = uid_init_process_group(unique_id, rank, world, device)

    def broadcast(self, buffer: torch.Tensor, sender: int) -> None:
        """Send the bytes of the sender's buffer into those of the other ranks, and wait for them.

        Raises EngineUnhealthy after a minute: the group is of no use any more.
        """
        import torch

        until = time.monotonic() + SECONDS
        self._group.broadcast(buffer, src=sender)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(buffer.device))
        while not done.query():
            if time.monotonic() > until:
                self.close()
                raise EngineUnhealthy("a broadcast to the engines did not end in time",
                                      "open the transport again")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._group.destroy()
