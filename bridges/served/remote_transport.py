"""What publishing to an engine of another process has in common, whatever way the bytes take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridges.api import BridgeError, ParamMeta, PublishFailed, PublishReceipt, WeightSource
from bridges.proof import manifest
from bridges.served import wire
from bridges.served.remote_engine import RemoteEngine


class RemoteTransport:
    """WeightTransport into a `RemoteEngine`. `folder`: the server's folder as this process sees it, where
    that has another name.

    The receipt's `content` is that of the transport in the engine's process.
    """

    def __init__(self, folder: str | Path | None = None):
        self._given, self._engine = folder, None

    def open(self, engine: RemoteEngine) -> None:
        """Raises BridgeError for an engine that is not a RemoteEngine, or whose folder is not to be seen from
        here."""
        name = type(self).__name__
        if not isinstance(engine, RemoteEngine):
            raise BridgeError(f"{name} loads a RemoteEngine, not a {type(engine).__name__}",
                              "choose its own transport")
        folder = Path(self._given or engine.folder)
        if not folder.is_dir():
            raise BridgeError(f"{folder}, where the engine reads weights, is no folder here",
                              f"mount a disk on both sides and name it: --folder there, {name}(folder=...) here")
        self._engine, self._folder = engine, folder

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Announce, carry over, and compare what the engine says it holds with what was sent.

        Raises ManifestMismatch before a byte moves, the engine being as it was; PublishFailed later, also
        when the engine's process died or gave no answer by the deadline: the engine is dirty, whatever became
        of it.
        """
        engine, start, metas = self._opened(), time.perf_counter(), source.manifest()
        digest = manifest.digest(metas)
        engine.call("begin", engine.deadlines.publish, version=version, tensors=wire.pack_manifest(metas))
        engine.dirty = f"the publish of version {version} has not finished"
        try:
            receipt = wire.unpack_receipt(self._carry(source, metas, version, digest))
        except PublishFailed:
            raise
        except Exception as e:  # whatever the source raised
            next_step = getattr(e, "next_step", "") or "repair the source and publish again in full"
            raise PublishFailed(f"version {version} broke off: {str(e).partition('\n')[0]}", next_step) from e
        if (receipt.version, receipt.digest, receipt.tensors) != (version, digest, len(metas)):
            raise PublishFailed(f"the engine says it holds {receipt}, sent was version {version}, {digest}",
                                "publish again")
        engine.dirty = None
        return dataclasses.replace(receipt, seconds=time.perf_counter() - start)

    def _carry(self, source: WeightSource, metas: Sequence[ParamMeta], version: int,
               digest: str) -> dict[str, Any]:
        """Bring the tensors over and return the receipt of the engine's process. May raise anything."""
        raise NotImplementedError

    def verify(self, receipt: PublishReceipt) -> None:
        """Have the engine's process verify. Raises PublishFailed when the engine is dirty or holds another
        publish."""
        if why := self._opened().dirty:
            raise PublishFailed(why, "publish again in full")
        self._engine.call("verify", self._engine.deadlines.publish, receipt=dataclasses.asdict(receipt))

    def close(self) -> None:
        self._engine = None

    def _opened(self) -> RemoteEngine:
        if self._engine is None:
            raise BridgeError("the transport is not open", "call open(engine) first")
        return self._engine
