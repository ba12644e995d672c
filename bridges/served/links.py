"""Two processes and a pair of buffers ("slots") between them: how weights go from a learner's memory to an
engine's.

    shared_memory  slots in a file that both map: for engines on a CPU
    cuda_ipc       slots in the learner's GPU memory, which the engine's process opens: for two processes on
    one GPU nccl, gloo     a pair of slots on each side, sent from one to the other: for two GPUs (gloo: the
    same over CPUs)

The bytes of all tensors, one after the other, are cut into buckets of a slot's size; both sides work out the
same cuts from the manifest. While the receiver empties one slot the sender fills the other. Counters in a
file that both map say how far each is, and every wait has a deadline. Nothing is pickled, and no port is
opened but NCCL's and gloo's own, on loopback.
"""

from __future__ import annotations

import datetime
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bridges.api import BridgeError, EngineUnhealthy, ParamMeta
from bridges.proof import manifest
from bridges.served.background import together
from bridges.vllm_plugin.slots import opened_cuda, shared_cuda

if TYPE_CHECKING:
    import torch

HOST_LINKS, GPU_LINKS = ("shared_memory", "gloo"), ("cuda_ipc", "nccl")
KINDS = HOST_LINKS + GPU_LINKS
DEVICE = {"gloo": "cpu", "nccl": "cuda"}
SLOT_BYTES = 2**28
SLOTS = 2
ALIGN = 256  # bytes: every tensor begins where the fastest copies can
# a bucket takes less than the second: whoever waits longer need not be as quick
POLL_SECONDS, SPIN_SECONDS = 1e-4, 2e-3
Buffer = Any  # uint8 [bytes]: numpy on the host, torch on a GPU


class Piece(NamedTuple):
    """Bytes [start, start + size) of a tensor lie at [at, at + size) of a slot."""

    name: str
    start: int
    at: int
    size: int


def buckets(metas: Sequence[ParamMeta], slot_bytes: int) -> list[list[Piece]]:
    """What goes through the slots, slot by slot. A tensor that does not fit where it begins goes on in the
    next bucket."""
    found, at = [[]], 0
    for m in metas:
        at, start, size = -(-at // ALIGN) * ALIGN, 0, manifest.nbytes([m])
        while start < size:
            if at >= slot_bytes:
                found.append([])
                at = 0
            take = min(size - start, slot_bytes - at)
            found[-1].append(Piece(m.name, start, at, take))
            start, at = start + take, at + take
    return found


class Mailbox:
    """A file that both sides map: how many buckets were filled and emptied in this publish, whether a side
    gave up, and the digests [n, 2] uint32 of what it sent, which are there once it says so."""

    def __init__(self, path: Path, tensors: int):
        exists = path.exists()
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as f:
            if not exists:
                os.posix_fallocate(f.fileno(), 0, 32 + 8 * tensors)
            words = np.memmap(f, np.uint8, "r+")
        self._numbers, self.digests = words[:32].view(np.int64), words[32:].view(np.uint32).reshape(-1, 2)

    filled = property(lambda self: int(self._numbers[0]), lambda self, n: self._put(0, n))
    emptied = property(lambda self: int(self._numbers[1]), lambda self, n: self._put(1, n))
    stopped = property(lambda self: bool(self._numbers[2]), lambda self, yes: self._put(2, yes))
    proved = property(lambda self: bool(self._numbers[3]), lambda self, yes: self._put(3, yes))

    def _put(self, i: int, n: int) -> None:
        self._numbers[i] = n

    def clear(self) -> None:
        self._numbers[:] = 0

    def wait(self, ready: Callable[[], bool], until: float, what: str,
             alive: Callable[[], Any] = lambda: None) -> None:
        """Until `ready()`. Raises EngineUnhealthy at `until` (time.monotonic) or when a side gave up; what
        `alive` raises."""
        start = now = time.monotonic()
        while not ready():
            alive()
            if self.stopped:
                raise EngineUnhealthy(f"the other side gave up while {what} was waited for")
            if now > until:
                raise EngineUnhealthy(f"{what} did not come by the deadline")
            time.sleep(0 if now - start < SPIN_SECONDS else POLL_SECONDS)
            now = time.monotonic()


class Link:
    """One end, over slots that both sides have in their address space. After an error, `stop`: neither end is
    of use any more.

    The sender asks for `slot` k, fills it, calls `send`, and at last `finish`; the receiver goes through
    `pieces`, then asks for `digests`. `until` is a time.monotonic. Raises EngineUnhealthy where the other
    side is too late or gave up.
    """

    def __init__(self, slots: Sequence[Buffer], mailbox: Mailbox):
        self.slots, self.mailbox, self.slot_bytes = slots, mailbox, len(slots[0])
        self.on_gpu = bool(getattr(slots, "is_cuda", False))

    def slot(self, k: int, until: float, alive: Callable[[], Any]) -> Buffer:
        """To be filled with bucket k: the bucket that was in it has been emptied. `alive` raises when nobody
        will."""
        self.mailbox.wait(lambda: self.mailbox.emptied > k - SLOTS, until, f"room for bucket {k}", alive)
        return _seen(self.slots[k % SLOTS])

    def send(self, k: int) -> None:
        """Hand bucket k over. What it was copied from may be overwritten afterwards."""
        self._flush()
        self.mailbox.filled = k + 1

    def finish(self, digests: np.ndarray) -> None:
        """[n, 2] uint32 of all that was sent, in the order of the manifest."""
        self.mailbox.digests[:] = digests
        self.mailbox.proved = True

    def pieces(self, metas: Sequence[ParamMeta], until: float) -> Iterator[tuple[Piece, Buffer]]:
        """Every piece and its bytes, which stay as they are until the next is asked for."""
        plan = buckets(metas, self.slot_bytes)
        self._ask(0)
        for k, bucket in enumerate(plan):
            self._await(k, until)
            if k + 1 < len(plan):
                self._ask(k + 1)
            slot = _seen(self.slots[k % SLOTS])
            for piece in bucket:
                yield piece, slot[piece.at : piece.at + piece.size]
            self._flush()
            self.mailbox.emptied = k + 1

    def digests(self, until: float) -> np.ndarray:
        """What `finish` said."""
        self.mailbox.wait(lambda: self.mailbox.proved, until, "the learner's digests")
        return np.array(self.mailbox.digests)

    def _flush(self) -> None:
        """Wait until what was copied from here to or from the slots is there."""
        if self.on_gpu:
            import torch

            torch.cuda.current_stream().synchronize()

    def _ask(self, k: int) -> None:
        """Let bucket k come while k - 1 is emptied."""

    def _await(self, k: int, until: float) -> None:
        self.mailbox.wait(lambda: self.mailbox.filled > k, until, f"bucket {k}")

    def stop(self) -> None:
        """Have the other side give up, too."""
        self.mailbox.stopped = True


class GroupLink(Link):
    """Slots on each side, and a process group of two that carries them over. The sender is rank 0."""

    def __init__(self, slots: Sequence[Buffer], mailbox: Mailbox, group: Any, rank: int):
        super().__init__(slots, mailbox)
        self._group, self._peer, self._works = group, 1 - rank, [None] * SLOTS

    def slot(self, k: int, until: float, alive: Callable[[], Any]) -> Buffer:
        slot = super().slot(k, until, alive)
        self._complete(k, until, alive)
        return slot

    def send(self, k: int) -> None:
        self._flush()
        self._works[k % SLOTS] = self._group.send([self.slots[k % SLOTS]], self._peer, k)
        self.mailbox.filled = k + 1

    def _ask(self, k: int) -> None:
        self._works[k % SLOTS] = self._group.recv([self.slots[k % SLOTS]], self._peer, k)

    def _await(self, k: int, until: float) -> None:
        super()._await(k, until)  # gloo waits in earnest: not before the bucket is under way
        self._complete(k, until)

    def _complete(self, k: int, until: float, alive: Callable[[], Any] = lambda: None) -> None:
        """Wait for what was begun last in the slot of bucket k."""
        work, self._works[k % SLOTS] = self._works[k % SLOTS], None
        if work is not None and self.on_gpu:
            self.mailbox.wait(work.is_completed, until, f"bucket {k}", alive)
        if work is not None:
            work.wait(datetime.timedelta(seconds=max(until - time.monotonic(), 0.001)))

    def stop(self) -> None:
        super().stop()
        group, self._group, self._works = self._group, None, [None] * SLOTS
        if self.on_gpu and group is not None:
            group.abort()  # a kernel that waits for the other side would wait for ever


def connect(
    kind: str, folder: Path, tensors: int, slot_bytes: int, seconds: float,
    accept: Callable[[dict[str, Any]], None]
) -> Link:
    """The sender's end. `accept` has the other side open its own, of a JSON object, in the same `folder`; no
    file stays there."""
    name = f"link-{secrets.token_hex(4)}"
    said = {"kind": kind, "name": name, "tensors": tensors, "slot_bytes": slot_bytes, "seconds": seconds}
    path = folder / f"{name}.data"
    try:
        mailbox = Mailbox(folder / f"{name}.mail", tensors)
        if kind == "shared_memory":
            link = Link(_mapped(path, slot_bytes), mailbox)
            accept(said)
        elif kind == "cuda_ipc":
            slots, handle = shared_cuda(slot_bytes)
            link = Link(slots, mailbox)
            accept(said | handle)
        else:
            group = together(lambda: _group(kind, path, 0, seconds), lambda: accept(said))
            link = GroupLink(_slots(DEVICE[kind], slot_bytes), mailbox, group, 0)
    finally:
        for file in folder.glob(f"{name}.*"):
            file.unlink(missing_ok=True)  # what is mapped stays
    return link


def accept(said: dict[str, Any], folder: Path) -> Link:
    """The receiver's end. Raises BridgeError for what this process cannot do."""
    kind, name, slot_bytes = said["kind"], said["name"], int(said["slot_bytes"])
    if kind not in KINDS or Path(name).name != name:
        raise BridgeError(f"there is no link {kind!r} named {name!r}", f"choose {', '.join(KINDS)}")
    if not (folder / f"{name}.mail").exists():
        raise BridgeError(
            f"{folder}, the folder of the engine's server, is not the one that the learner uses",
            "name it as the learner sees it: RemoteDirect(kind, folder=...)")
    mailbox, path = Mailbox(folder / f"{name}.mail", int(said["tensors"])), folder / f"{name}.data"
    if kind == "shared_memory":
        return Link(_mapped(path, slot_bytes), mailbox)
    if kind == "cuda_ipc":
        return Link(opened_cuda(said), mailbox)
    return GroupLink(_slots(DEVICE[kind], slot_bytes), mailbox, _group(kind, path, 1, float(said["seconds"])),
                     1)


def _mapped(path: Path, slot_bytes: int) -> np.ndarray:
    """uint8 [SLOTS, slot_bytes] in a file, which is made if need be."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as f:
        # of a file with holes a full disk would be known by SIGBUS
        os.posix_fallocate(f.fileno(), 0, SLOTS * slot_bytes)
        return np.memmap(f, np.uint8, "r+").reshape(SLOTS, slot_bytes)


def _slots(device: str, slot_bytes: int) -> torch.Tensor:
    import torch

    return torch.empty((SLOTS, slot_bytes), dtype=torch.uint8, device=device)


def _group(kind: str, path: Path, rank: int, seconds: float) -> Any:
    """A process group of its own: vLLM's in the same process is not touched. It has met the other side when
    this returns."""
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=seconds)
    store = dist.FileStore(str(path), 2)
    store.set_timeout(timeout)
    if kind == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = timeout, [
            dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, rank, 2, options)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # two GPUs of one host
    # which would end this process: deadlines are kept here
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group, word = dist.ProcessGroupNCCL(store, rank, 2, options), torch.zeros(1, device="cuda")
    (group.recv if rank else group.send)([word], 1 - rank, 0).wait()
    torch.cuda.synchronize()
    return group


def _seen(slot: Buffer) -> Buffer:
    """Memory of the host as numpy, whoever owns it."""
    return slot if isinstance(slot, np.ndarray) or slot.is_cuda else slot.numpy()
