"""Weights from JAX into a vLLM engine of the same process: DLPack views, read by vLLM's own layerwise reload."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bridges import manifest
from bridges.api import BridgeError, ParamMeta, PublishFailed, PublishReceipt, WeightSource
from bridges.rollout.vllm_engine import VllmEngine
from bridges.weights.dlpack import torch_view

if TYPE_CHECKING:
    import torch


class VllmReload:
    """WeightTransport into a `VllmEngine`. One copy on the device, none on the host; the source's buffers are only read."""

    def __init__(self):
        self._engine: VllmEngine | None = None

    def open(self, engine: VllmEngine) -> None:
        """Raises BridgeError for an engine that is not a VllmEngine."""
        if not isinstance(engine, VllmEngine):
            raise BridgeError(f"VllmReload loads a VllmEngine, not a {type(engine).__name__}", "choose its own transport")
        self._engine = engine

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Load every tensor of `source`, drop the prefix cache, declare `version` current.

        Raises ManifestMismatch before a byte moves, the engine being as it was; PublishFailed later, the engine being dirty.
        """
        engine, metas = self._opened(), source.manifest()
        manifest.check(metas, engine.expected_manifest())
        engine.require_awake()
        start, stream = time.perf_counter(), _Stream(source, metas)
        try:
            engine.load(stream, version)
        except Exception as e:
            raise PublishFailed(f"vLLM could not load version {version}: {e}", "close the engine and build a new one") from e
        if stream.error:
            raise PublishFailed(
                f"version {version} broke off after {stream.sent} of {len(metas)} tensors: {stream.error}",
                "repair the source and publish again: the engine refuses to generate until then",
            ) from stream.error
        digest = manifest.digest(metas)
        caches = engine.commit(version, digest)
        return PublishReceipt(version, len(metas), manifest.nbytes(metas), digest, time.perf_counter() - start, caches)

    def verify(self, receipt: PublishReceipt) -> None:
        """Raises PublishFailed when the engine is dirty or holds another publish than the receipt's."""
        engine = self._opened()
        have, want = (engine.weight_version(), engine.weight_digest()), (receipt.version, receipt.digest)
        if have != want:
            raise PublishFailed(f"the engine holds (version, digest) {have}, the receipt says {want}", "publish again")

    def close(self) -> None:
        self._engine = None

    def _opened(self) -> VllmEngine:
        if self._engine is None:
            raise BridgeError("the transport is not open", "call open(engine) first")
        return self._engine


class _Stream:
    """The source as (HF name, torch view), each held to its manifest entry.

    It ends early instead of raising: an exception that passes through vLLM leaves its reload half open, so that the next
    publish would mix with this one. It holds every view until it is dropped, as vLLM copies asynchronously and lets go of
    a view at once, when a source that makes its tensors on the fly would see their memory reused under the copy.
    """

    def __init__(self, source: WeightSource, metas: tuple[ParamMeta, ...]):
        self.sent, self.error = 0, None
        self._source, self._metas, self._views = source, metas, []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for meta, (name, buffer) in zip(self._metas, self._source, strict=True):
                view = _checked(meta, name, buffer)
                self._views.append(view)
                yield name, view
                self.sent += 1
        except Exception as e:  # whatever the source raised: publish raises it again as PublishFailed
            self.error = e


def _checked(meta: ParamMeta, name: str, buffer: Any) -> torch.Tensor:
    view = torch_view(buffer)
    manifest.check_tensor(meta, name, str(view.dtype).removeprefix("torch."), view.shape)
    return view
