"""Publishing into the embedded engine: the same wire (names, layout, manifest check) as for any other engine."""

from __future__ import annotations

import time

import jax

from bridges import manifest
from bridges.api import PublishFailed, PublishReceipt, WeightSource
from bridges.rollout.jax_engine import JaxEngine


class JaxInprocess:
    """WeightTransport into a JaxEngine of the same process. The engine's cache lives inside a generate call, so that no
    key or value of the old weights survives a publish."""

    def open(self, engine: JaxEngine) -> None:
        self._engine = engine

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Raises ManifestMismatch before a byte moves, PublishFailed (engine dirty) when the source breaks off."""
        start, metas = time.perf_counter(), source.manifest()
        manifest.check(metas, self._engine.expected_manifest())
        self._engine.mark_dirty()
        try:
            tensors = dict(source)
            if missing := [m.name for m in metas if m.name not in tensors]:
                raise PublishFailed(f"the source promised {len(metas)} tensors and left out {missing[:5]}")
            self._engine.load(jax.block_until_ready(tensors), version)
        except PublishFailed:
            raise
        except Exception as e:
            raise PublishFailed(f"the publish of version {version} broke off: {e}", "publish again in full") from e
        seconds = time.perf_counter() - start
        self._digest = manifest.digest(metas)
        return PublishReceipt(version, len(metas), manifest.nbytes(metas), self._digest, seconds, ("kv_cache",))

    def verify(self, receipt: PublishReceipt) -> None:
        """Raises PublishFailed when the engine does not hold the version of the receipt."""
        have = (self._engine.weight_version(), self._digest)
        if have != (receipt.version, receipt.digest):
            raise PublishFailed(f"the engine holds version {have[0]}, the receipt says {receipt.version}", "publish again")

    def close(self) -> None:
        """Nothing is held."""
