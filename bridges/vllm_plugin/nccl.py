"""One NCCL group of a learner's processes, the first ranks, and all ranks of all engines. They meet by a
unique id, so no port is chosen and nothing is pickled. The library is the one that vLLM loads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bridges.api import EngineUnhealthy

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 1e-3


def unique_id() -> bytes:
    """A new id. Its 128 bytes go to every rank."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


class Group:
    """A rank's end. All ranks enter at once: the constructor returns when they have met."""

    def __init__(self, unique_id: bytes, rank: int, world: int, device: Any):
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        self._group = uid_init_process_group(unique_id, rank, world, device)

    def broadcast(self, buffer: torch.Tensor, sender: int = 0, until: float = float("inf")) -> None:
        """Send the bytes of the sender's buffer into those of the other ranks, and wait for them.

        Raises EngineUnhealthy at `until` (time.monotonic): the group is of no use any more.
        """
        import torch

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
