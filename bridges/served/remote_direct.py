"""Weights into an engine of another process without a file: through memory that both see, or from GPU to GPU.

    begin     the engine's process compares manifests, and is dirty from here on
    receive   it writes what comes over the link where its kernels read; this process sends meanwhile
    proof     digests of this process's own tensors are compared with the engine's, in its process
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridges.api import BridgeError, EngineUnhealthy, ParamMeta, WeightSource
from bridges.proof import manifest
from bridges.served import links
from bridges.served.background import in_background
from bridges.served.linked import send
from bridges.served.remote_engine import RemoteEngine
from bridges.served.remote_transport import RemoteTransport

# for the engine's process to say what went wrong there, when sending to it went wrong here
REASON_SECONDS = 1.0


class RemoteDirect(RemoteTransport):
    """WeightTransport into a `RemoteEngine` of this host. kind: "shared_memory" (CPUs), "cuda_ipc" (one GPU),
    "nccl" (two GPUs), or "gloo" (nccl's stand-in on CPUs). On GPUs the server must write in place:
    `transport="in_place"`, or "auto".

    slot_bytes, or fewer if the model has fewer: of which two are held for as long as the transport is open,
    with nccl and gloo on either side; with cuda_ipc for as long as this process lives, by all its links
    together, which publish one at a time.
    """

    def __init__(self, kind: str, folder: str | Path | None = None, *, slot_bytes: int = links.SLOT_BYTES):
        if kind not in links.KINDS:
            raise BridgeError(f"there is no link {kind!r}", f"choose {', '.join(links.KINDS)}, or RemoteFile")
        super().__init__(folder)
        self._kind, self._slot_bytes, self._link = kind, slot_bytes, None

    def open(self, engine: RemoteEngine) -> None:
        """Also raises BridgeError where the two processes cannot be linked so."""
        super().open(engine)
        metas = engine.expected_manifest()
        room = sum(-(-manifest.nbytes([m]) // links.ALIGN) * links.ALIGN for m in metas)
        self._tensors, self._slot = len(metas), min(self._slot_bytes, max(room, links.ALIGN))
        self._connect()

    def _connect(self) -> None:
        def accept(said: dict[str, Any]) -> None:
            self._engine.call("connect", said=said)

        seconds = self._engine.deadlines.call
        try:
            self._link = links.connect(self._kind, self._folder, self._tensors, self._slot, seconds, accept)
        except BridgeError:
            raise
        except Exception as e:  # torch's and NCCL's, of whatever class
            raise BridgeError(f"no link {self._kind} to the engine: {e}",
                              "see what this machine has; files always work") from e

    def _carry(self, source: WeightSource, metas: Sequence[ParamMeta], version: int,
               digest: str) -> dict[str, Any]:
        engine, seconds = self._engine, self._engine.deadlines.publish
        if self._link is None:
            self._connect()
        self._link.mailbox.clear()
        call = functools.partial(engine.call, "receive", seconds, version=version, digest=digest,
                                 within=seconds)
        answer = in_background(call)

        def alive() -> None:
            if answer.done():
                raise answer.exception() or EngineUnhealthy(
                    "the engine stopped receiving before everything was sent")

        try:
            send(self._link, source, metas, time.monotonic() + seconds, alive)
            return answer.result()
        except BaseException as e:
            self._break(answer, e)
            raise

    def _break(self, answer: concurrent.futures.Future, error: BaseException) -> None:
        """Give the link up: the next publish makes another. Raises the engine's own account, if any, where
        the link broke."""
        reason = None
        if isinstance(error, RuntimeError):  # of the link, and of torch
            with contextlib.suppress(concurrent.futures.TimeoutError):
                reason = answer.exception(REASON_SECONDS)
        self._link.stop()
        self._link = None
        if reason is not None:
            raise reason

    def close(self) -> None:
        if self._link is not None:
            self._link.stop()
        self._link = None
        super().close()
