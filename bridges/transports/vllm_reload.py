"""Publish weights from JAX into a vLLM engine of the same process by vLLM's own layerwise reload, which reads
DLPack views."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError, ParamMeta, PublishFailed, PublishReceipt, RolloutEngine, WeightSource
from bridges.engines.vllm_engine import VllmEngine
from bridges.inside_vllm.kv_scales import check_host, loader_takes, on_device
from bridges.proof import manifest
from bridges.proof.publishing import check_held, failing, opened, receipt
from bridges.sources.dlpack import torch_view

if TYPE_CHECKING:
    import torch


class VllmReload:
    """WeightTransport into a `VllmEngine`: one copy on the device, none on the host. It only reads the
    source's buffers."""

    def __init__(self):
        self._engine: VllmEngine | None = None
        self._scales: dict[str, float] = {}

    def open(self, engine: RolloutEngine) -> None:
        """Raises BridgeError for an engine that is not a VllmEngine, or whose scales of FP8 attention vLLM's
        loader does not take."""
        if not isinstance(engine, VllmEngine):
            raise BridgeError(f"VllmReload loads a VllmEngine, not a {type(engine).__name__}",
                              "choose its own transport")
        if engine.linears:
            raise BridgeError("vLLM's own reload is not used for weights in four bits, which vLLM reads from "
                              "their folder", 'leave rollout.publish out: transport VllmPacked')
        if not loader_takes(engine.kv_scale_places):
            raise BridgeError("vLLM's own reload takes scales of FP8 attention only beside FP8 weights",
                              'publish in place: transport VllmInplace, rollout.publish = "in_place"')
        self._engine = engine

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Load every tensor of `source`, drop the prefix cache, declare `version` current.

        Raises ManifestMismatch before a byte moves, which leaves the engine as it was, and PublishFailed
        later, which leaves it dirty.
        """
        engine, metas = opened(self._engine), source.manifest()
        manifest.check(metas, engine.expected_manifest())
        engine.require_awake()
        start, stream = time.perf_counter(), _Stream(source, metas)
        try:
            engine.load(stream, version)
        except Exception as e:
            raise PublishFailed(f"vLLM could not load version {version}: {e}",
                                "close the engine and build a new one") from e
        if stream.error:
            raise PublishFailed(
                f"version {version} broke off after {stream.sent} of {len(metas)} tensors: {stream.error}",
                "repair the source and publish again: the engine refuses to generate until then",
            ) from stream.error
        self._scales = stream.scales
        with failing(f"version {version} arrived but is not in use", "publish again in full"):
            self._check_scales(engine)
            caches = engine.commit(version, manifest.digest(metas))
        return receipt(metas, version, start, caches)

    def verify(self, receipt: PublishReceipt) -> None:
        """Raise PublishFailed if the engine is dirty or holds another publish than the receipt's."""
        engine = opened(self._engine)
        check_held((engine.weight_version(), engine.weight_digest(), ""), receipt)
        try:
            self._check_scales(engine)
        except PublishFailed:
            engine.drop("its scales of attention are no longer those that were published")
            raise

    def close(self) -> None:
        self._engine = None

    def _check_scales(self, engine: VllmEngine) -> None:
        """Read the scales back, because vLLM's loader skips scales that it has no place for, with only a
        warning."""
        check_host(engine.kv_scale_places)
        for name, have in on_device(engine.kv_scale_places).items():
            if have != self._scales[name]:
                raise PublishFailed(f"{name} is {have} in the engine, but {self._scales[name]} was sent",
                                    "publish again in full")


class _Stream:
    """The source as pairs (HF name, torch view), each checked against its manifest entry.

    On an error it ends early instead of raising: an exception that passes through vLLM leaves its reload half
    open, and the next publish would mix with this one. It keeps every view alive: vLLM copies asynchronously
    and drops a view at once, so the memory of a tensor made on the fly could be reused during the copy.
    """

    def __init__(self, source: WeightSource, metas: tuple[ParamMeta, ...]):
        self.sent, self.error, self.scales = 0, None, {}
        self._source, self._metas, self._views = source, metas, []
        # whether a tensor's scales are positive and finite; read at the end, to avoid a wait for each
        self._sound: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for meta, (name, buffer) in zip(self._metas, self._source, strict=True):
                view = _checked(meta, name, buffer)
                if meta.role != "weight":
                    self._sound[name] = ((view > 0) & view.isfinite()).all()
                if meta.role == "kv_scale":
                    self._require_sound([name])  # vLLM asserts the same without naming the tensor
                    self.scales[name] = view.item()
                self._views.append(view)
                yield name, view
                self.sent += 1
            self._require_sound(self._sound)
        except Exception as e:  # whatever the source raised: publish raises it again as PublishFailed
            self.error = e

    def _require_sound(self, names: Iterable[str]) -> None:
        for name in (name for name in names if not self._sound[name]):
            raise ValueError(f"{name} holds a scale that is not positive and finite")


def _checked(meta: ParamMeta, name: str, buffer: Any) -> torch.Tensor:
    view = torch_view(buffer)
    manifest.check_tensor(meta, name, str(view.dtype).removeprefix("torch."), view.shape)
    return view
