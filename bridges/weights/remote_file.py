"""Weights into an engine of another process, as files in a folder that both processes see.

    begin   the engine's process compares manifests, and is dirty from here on
    write   safetensors in the folder, synced to the disk
    load    the engine's process checks and reads the folder, publishes it by a transport of its own, and says what arrived
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from bridges import manifest, wire
from bridges.api import BridgeError, PublishFailed, PublishReceipt, WeightSource
from bridges.rollout.remote_engine import RemoteEngine
from bridges.weights.safetensors_file import SHARD_BYTES, write_folder


class RemoteFile:
    """WeightTransport into a `RemoteEngine`. `folder`: the server's folder as this process sees it, where that has another name.

    The receipt's `content` is that of the transport in the engine's process.
    """

    def __init__(self, folder: str | Path | None = None, *, shard_bytes: int = SHARD_BYTES):
        self._given, self._shard_bytes, self._engine = folder, shard_bytes, None

    def open(self, engine: RemoteEngine) -> None:
        """Raises BridgeError for an engine that is not a RemoteEngine, or whose folder is not to be seen from here."""
        if not isinstance(engine, RemoteEngine):
            raise BridgeError(f"RemoteFile loads a RemoteEngine, not a {type(engine).__name__}", "choose its own transport")
        folder = Path(self._given or engine.folder)
        if not folder.is_dir():
            raise BridgeError(f"{folder}, where the engine reads weights, is no folder here",
                              "mount a disk on both sides and name it: --folder there, RemoteFile(folder) here")  # fmt: skip
        self._engine, self._folder = engine, folder

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Write, load, and compare what the engine says it holds with what was written.

        Raises ManifestMismatch before a byte moves, the engine being as it was; PublishFailed later, also when the engine's
        process died or gave no answer by the deadline: the engine is dirty, whatever became of it.
        """
        engine, start, metas = self._opened(), time.perf_counter(), source.manifest()
        seconds, digest = engine.deadlines.publish, manifest.digest(metas)
        engine.call("begin", seconds, version=version, tensors=wire.pack_manifest(metas))
        engine.dirty = f"the publish of version {version} has not finished"
        try:
            with self._written(source, version) as name:
                receipt = wire.unpack_receipt(engine.call("load", seconds, version=version, digest=digest, name=name))
        except PublishFailed:
            raise
        except Exception as e:  # whatever the source raised
            next_step = getattr(e, "next_step", "") or "repair the source and publish again in full"
            raise PublishFailed(f"version {version} broke off: {str(e).partition('\n')[0]}", next_step) from e
        if (receipt.version, receipt.digest, receipt.tensors) != (version, digest, len(metas)):
            raise PublishFailed(f"the engine says it holds {receipt}, sent was version {version}, {digest}", "publish again")
        engine.dirty = None
        return dataclasses.replace(receipt, seconds=time.perf_counter() - start)

    @contextlib.contextmanager
    def _written(self, source: WeightSource, version: int) -> Iterator[str]:
        """The name of a folder with the weights, which is gone afterwards."""
        path = self._folder / f"version-{version}-{secrets.token_hex(4)}"
        write_folder(source, path, version, shard_bytes=self._shard_bytes)
        try:
            yield path.name
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def verify(self, receipt: PublishReceipt) -> None:
        """Have the engine's process verify. Raises PublishFailed when the engine is dirty or holds another publish."""
        if why := self._opened().dirty:
            raise PublishFailed(why, "publish again in full")
        self._engine.call("verify", self._engine.deadlines.publish, receipt=dataclasses.asdict(receipt))

    def close(self) -> None:
        self._engine = None

    def _opened(self) -> RemoteEngine:
        if self._engine is None:
            raise BridgeError("the transport is not open", "call open(engine) first")
        return self._engine
