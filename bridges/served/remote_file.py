"""Weights into an engine of another process, as files in a folder that both processes see.

    begin   the engine's process compares manifests, and is dirty from here on
    write   safetensors in the folder, synced to the disk
    load    the engine's process checks and reads the folder, publishes it by a transport of its own, and says what arrived
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridges.api import ParamMeta, WeightSource
from bridges.served.remote_transport import RemoteTransport
from bridges.transports.safetensors_file import SHARD_BYTES, write_folder


class RemoteFile(RemoteTransport):
    """WeightTransport into a `RemoteEngine`, through its server's folder. Its writer holds `shard_bytes` in
    memory at once."""

    def __init__(self, folder: str | Path | None = None, *, shard_bytes: int = SHARD_BYTES):
        super().__init__(folder)
        self._shard_bytes = shard_bytes

    def _carry(self, source: WeightSource, metas: Sequence[ParamMeta], version: int,
               digest: str) -> dict[str, Any]:
        engine = self._opened()
        with self._written(source, version) as name:
            return engine.call("load", engine.deadlines.publish, version=version, digest=digest, name=name)

    @contextlib.contextmanager
    def _written(self, source: WeightSource, version: int) -> Iterator[str]:
        """The name of a folder with the weights, which is gone afterwards."""
        path = self._folder / f"version-{version}-{secrets.token_hex(4)}"
        write_folder(source, path, version, shard_bytes=self._shard_bytes)
        try:
            yield path.name
        finally:
            shutil.rmtree(path, ignore_errors=True)
