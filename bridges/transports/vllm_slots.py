"""Publish weights with low-rank adapters into a vLLM engine of the same process: the base by another
transport, the adapters into vLLM's slots, in place, without a disk (`bridges.inside_vllm.adapters`).

A base that is there already is not sent again. Adapters are proven as weights in place are: digests of what
was sent and of the live slots must be equal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.api import (
    AdaptedSource,
    BridgeError,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
    WeightTransport,
)
from bridges.engines.vllm_engine import VllmEngine, synchronise
from bridges.inside_vllm.adapters import Slots, reload_knows_slots
from bridges.proof import manifest
from bridges.proof.digest import by_rows, stack_digests, torch_words
from bridges.proof.publishing import check_adapter, check_held, failing, opened, receipt
from bridges.sources.sent import Sent, parts
from bridges.transports.vllm_reload import VllmReload

if TYPE_CHECKING:
    import torch

PUBLISH_AGAIN = "publish again in full; if it happens again, something else writes to the engine's memory"


@dataclasses.dataclass
class Proven:
    """Adapters that were published: their tensors, and the digests [n, 2] uint32 of these, in that order."""

    metas: tuple[ParamMeta, ...]
    digests: np.ndarray

    def content(self, base: str) -> str:
        """A digest of names, bytes and `base`, in any order of the tensors."""
        by_name = sorted(zip((m.name for m in self.metas), self.digests.tolist()))
        return hashlib.sha256(f"{base} {by_name}".encode()).hexdigest()


class VllmSlots:
    """AdapterTransport into a `VllmEngine` with slots. weights: the transport of the base, VllmInplace or
    VllmReload. It only reads the source's buffers."""

    def __init__(self, weights: WeightTransport):
        self._weights, self._engine = weights, None
        self._base: PublishReceipt | None = None
        self._parts: tuple[Any, ...] = ()
        self._proven: dict[str, Proven] = {}
        self._receipt: PublishReceipt | None = None

    def open(self, engine: RolloutEngine) -> None:
        """Raises BridgeError for an engine that is not a VllmEngine with slots, and as the base's transport
        does."""
        if not isinstance(engine, VllmEngine) or engine.slots is None:
            raise BridgeError("VllmSlots writes to a VllmEngine with slots for adapters, not a "
                              f"{type(engine).__name__} "
                              "without", "build the engine with adapters=AdapterSlots(...), or choose "
                                         "its own transport")
        if isinstance(self._weights, VllmReload) and not reload_knows_slots():
            raise BridgeError("this vLLM's own reload does not know linears with slots for adapters",
                              'publish in place: VllmSlots(VllmInplace()), rollout.publish = "in_place"')
        self._weights.open(engine)
        self._engine = engine

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Write the adapters of an AdaptedSource, and its base unless the engine holds it; drop the prefix
        cache, and declare `version` current. Another base drops the adapters that were published by name. A
        source without adapters is a base; requests that name no adapter then get zeros.

        The receipt counts what was written. Raises ManifestMismatch before a byte moves, and PublishFailed
        later, which leaves the engine dirty.
        """
        engine, start = opened(self._engine), time.perf_counter()
        adapted = isinstance(source, AdaptedSource)
        base, adapters = (source.base, source.adapters) if adapted else (source, None)
        metas = tuple(adapters.manifest()) if adapters else ()
        self._slots.check(metas)
        digest = manifest.digest((*base.manifest(), *metas))
        if wrote := not self._holds(source):
            self._base, self._parts = None, ()
            self._base = self._weights.publish(base, version)
        engine.begin(version)
        with failing(f"version {version} broke off"):
            if wrote:
                self._slots.clear()  # vLLM's own reload has dropped them
                self._proven.clear()
                self._parts = source.base_parts() if adapted else ()
            if adapters:
                self._write("", adapters, metas, version)
            caches = engine.commit(version, digest)
        assert self._base is not None
        tensors, nbytes = (self._base.tensors, self._base.bytes) if wrote else (0, 0)
        content = self._proven[""].content(self._base.content) if adapters else self._base.content
        self._receipt = PublishReceipt(version, tensors + len(metas), nbytes + manifest.nbytes(metas), digest,
                                       time.perf_counter() - start, caches, content)
        return self._receipt

    def publish_adapter(self, name: str, source: WeightSource, version: int) -> PublishReceipt:
        """Write the adapters of `source` into the slot of `name`, a free one if it has none. Weights and
        other adapters stay as they are.

        Raises BridgeError before the first publish, and if no slot is free; ManifestMismatch before a byte
        moves; PublishFailed later, which frees the slot.
        """
        engine, start, metas = opened(self._engine), time.perf_counter(), tuple(source.manifest())
        check_adapter(name, engine.weight_version())
        engine.require_awake()
        self._slots.check(metas)
        self._slots.place(name)
        try:
            with failing(f"adapter {name!r}, version {version}, broke off",
                         "repair the source and publish it again"):
                self._write(name, source, metas, version)
        except BaseException:  # an interruption, too: it is half written
            self.drop_adapter(name)
            raise
        return receipt(metas, version, start, (), self._proven[name].content(""))

    def drop_adapter(self, name: str) -> None:
        """Free the slot of `name`. Raises ValueError if it is not held."""
        self._slots.drop(name)
        self._proven.pop(name, None)

    def verify(self, receipt: PublishReceipt) -> None:
        """Read the base as its transport does, and the slots of all adapters again.

        Raises PublishFailed if they belong to another publish than the receipt, or have changed since, which
        leaves the engine dirty. Raises BridgeError if the engine is asleep.
        """
        engine, ours = opened(self._engine), self._receipt
        have = engine.weight_version(), engine.weight_digest(), ours.content if ours else ""
        check_held(have, receipt, self._base is not None)
        engine.require_awake()
        assert self._base
        self._weights.verify(dataclasses.replace(self._base, version=receipt.version, digest=receipt.digest))
        for name, proven in self._proven.items():
            try:
                self._compare(name, proven, f"adapter {name!r} has changed")
            except PublishFailed:
                engine.drop("its adapters are no longer those that were published")
                raise

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._weights.close()
        self._engine, self._parts, self._base = None, (), None
        self._proven.clear()

    def _holds(self, source: WeightSource) -> bool:
        """Whether the engine has the source's base already."""
        clean = self._base is not None and opened(self._engine).weight_version() is not None
        mine = source.base_parts() if isinstance(source, AdaptedSource) else ()
        return clean and bool(mine) and len(mine) == len(self._parts) and all(map(lambda x, y: x is y, mine,
                                                                                  self._parts))

    def _write(self, name: str, source: WeightSource, metas: tuple[ParamMeta, ...], version: int) -> None:
        targets = self._slots.begin(name, metas)
        sent = Sent({m.name: i for i, m in enumerate(metas)})
        synchronise()  # the engine may still be reading
        for part in parts(source, metas):
            sent.digest(part)
            for rows, view in zip(part, sent.views(part)):
                _copy([targets[n] for n in rows.names], view, rows.names)
            synchronise()  # a part that is not held is dropped now
            part.clear()
        sent.join()
        proven = Proven(metas, sent.digests())
        self._compare(name, proven, f"adapter {name!r}, version {version}, did not arrive")
        self._proven[name] = proven
        self._slots.of(name).version = version

    def _compare(self, name: str, proven: Proven, problem: str) -> None:
        have = live_digests(self._slots.tensors(name, proven.metas))
        if (wrong := np.flatnonzero((have != proven.digests).any(1))).size:
            raise PublishFailed(f"{problem}: {len(wrong)} of {len(have)} tensors of its slot differ from "
                                f"those that were sent, first {proven.metas[wrong[0]].name}", PUBLISH_AGAIN)

    @property
    def _slots(self) -> Slots:
        slots = opened(self._engine).slots
        assert slots is not None
        return slots


def live_digests(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    """Digests [n, 2] uint32 of tensors in the engine's memory, in their order. Those of one shape and type
    are stacked by one copy, because a view for JAX costs the host more than a matrix does."""
    import torch

    alike: dict[tuple, list[int]] = {}
    every = [tensor if tensor.dim() else tensor[None] for tensor in tensors.values()]
    for i, tensor in enumerate(every):
        alike.setdefault((tensor.shape, tensor.dtype), []).append(i)
    stacks = [torch.stack([every[i] for i in rows]) for rows in alike.values()]
    synchronise()
    found = np.asarray(stack_digests(*map(torch_words, stacks))) if stacks else np.zeros((0, 2), np.uint32)
    digests = np.empty_like(found)
    digests[[i for rows in alike.values() for i in rows]] = found
    return digests


def _copy(targets: Sequence[torch.Tensor], view: torch.Tensor, names: Sequence[str]) -> None:
    """Copy view [len(targets), ...]."""
    import torch

    rows = by_rows(view)
    if len(rows) != len(targets):
        raise ValueError(f"{len(rows)} rows for {len(targets)} tensors, first {names[0]}")
    have, want = (rows.dtype, rows.shape[1:]), (targets[0].dtype, targets[0].shape)
    if have != want:
        raise ValueError(f"{names[0]}: the source yields {have}, but its manifest says {want}")
    torch._foreach_copy_(list(targets), list(rows.unbind()))  # pyright: ignore[reportPrivateImportUsage]
