"""Publish weights in four bits into a vLLM engine of the same process, which has read them from their folder:
prove that they are the source's, and write all others in place.

vLLM repacks packed weights for its kernel, and nothing writes them. The proof has two parts:

    once           for every linear the numbers that the kernel multiplies by (`bridges.inside_vllm.packed`)
                   are those that the source computes with (`PackedSource.decoded`)
    every publish  the source's tensors, and the engine's repacked ones, have the digests that they had then

Embeddings, norms and the head are written as `VllmInplace` does, so that noise on gains arrives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bridges.api import (
    BridgeError,
    PackedSource,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    WeightSource,
)
from bridges.engines.vllm_engine import VllmEngine
from bridges.inside_vllm.packed import COLUMNS, Linear, kernel, manifest_of
from bridges.inside_vllm.stacks import layer_of
from bridges.proof import manifest
from bridges.proof.publishing import check_held, failing, opened
from bridges.sources.dlpack import torch_view
from bridges.sources.sent import Sent, layers
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_slots import live_digests

if TYPE_CHECKING:
    import torch

# Numbers that are bfloat16 must be equal. Those of NVFP4 with a divisor that is no power of two are rounded,
# and a kernel may round its reciprocal and the sum, too.
ROUNDINGS = 2.0**-7
ANEW = "close the engine and build a new one, which reads its folder again"


class Proven(NamedTuple):
    """Digests [n, 2] uint32: of the source's tensors by name, and of the engine's in their order."""

    sent: dict[str, list[int]]
    live: np.ndarray


class VllmPacked:
    """WeightTransport into a `VllmEngine` with weights in four bits. It only reads the source's buffers."""

    def __init__(self):
        self._floats = VllmInplace(beside_packed=True)
        self._engine: VllmEngine | None = None
        self._proven: Proven | None = None
        self._receipt: PublishReceipt | None = None
        self._written: PublishReceipt | None = None  # of the weights that are not in four bits

    def open(self, engine: RolloutEngine) -> None:
        """Raises BridgeError for an engine without weights in four bits, and as VllmInplace does."""
        if not isinstance(engine, VllmEngine) or not engine.linears:
            raise BridgeError("VllmPacked is for a VllmEngine with weights in four bits, not a "
                              f"{type(engine).__name__} without", "choose VllmInplace or VllmReload")
        self._floats.open(engine)
        self._engine, self._proven = engine, None

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Prove the weights in four bits, write all others, and declare `version` current. The receipt counts
        what was written.

        Raises ManifestMismatch before a byte moves, and PublishFailed later, which leaves the engine dirty.
        """
        engine, metas, start = opened(self._engine), tuple(source.manifest()), time.perf_counter()
        manifest.check(metas, engine.expected_manifest())
        held = {meta.name for linear in engine.linears for meta in manifest_of(linear, "")}
        engine.begin(version)
        with failing(f"version {version} could not be proven"):
            self._prove(source, _Part(source, held, True))
        written = self._floats.publish(_Part(source, held, False), version)
        digest = manifest.digest(metas)
        engine.commit(version, digest)
        assert self._proven
        both = f"{written.content} {sorted(self._proven.sent.items())}"
        content = hashlib.sha256(both.encode()).hexdigest()
        self._written = written
        self._receipt = dataclasses.replace(written, digest=digest, content=content,
                                            seconds=time.perf_counter() - start)
        return self._receipt

    def verify(self, receipt: PublishReceipt) -> None:
        """Read the engine's tensors again, those in four bits among them.

        Raises PublishFailed if they belong to another publish than the receipt, or have changed since, which
        leaves the engine dirty. Raises BridgeError if the engine is asleep.
        """
        engine, ours = opened(self._engine), self._receipt
        have = engine.weight_version(), engine.weight_digest(), ours.content if ours else ""
        check_held(have, receipt, ours is not None)
        engine.require_awake()
        assert self._written
        written = dataclasses.replace(self._written, version=receipt.version, digest=receipt.digest)
        self._floats.verify(written)
        try:
            self._compare_live()
        except PublishFailed:
            engine.drop("its weights in four bits are no longer those that were proven")
            raise

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._floats.close()
        self._engine, self._proven, self._receipt, self._written = None, None, None, None

    def _prove(self, source: WeightSource, held: _Part) -> None:
        sent = _digests(held)
        if self._proven and self._proven.sent == sent:
            return self._compare_live()
        self._proven = None
        if not isinstance(source, PackedSource):
            raise BridgeError(f"a {type(source).__name__} does not say which numbers its weights in four "
                              "bits are", "give it PackedSource.decoded")
        biases = {name: buffer for name, buffer in held if name.endswith(".bias")}
        for linear in opened(self._engine).linears:
            self._compare_numbers(linear, source, biases)
        self._proven = Proven(sent, self._live())

    def _compare_numbers(self, linear: Linear, source: PackedSource, biases: dict[str, Any]) -> None:
        for start in range(0, linear.columns, COLUMNS):
            stop = min(start + COLUMNS, linear.columns)
            have = self._on_engine(linear.numbers, start, stop, "bfloat16")
            for name, first, last in linear.parts:
                want = torch_view(source.decoded(f"{name}.weight", start, stop))
                _compare(f"{name}.weight", have[:, first:last].T, want, linear)
        if linear.has_bias:
            have = self._on_engine(linear.bias, "bfloat16")
            for name, first, last in linear.parts:
                _compare(f"{name}.bias", have[first:last], torch_view(biases[f"{name}.bias"]), linear)

    def _on_engine(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            return opened(self._engine).on_model(lambda model: function(*args))

    def _live(self) -> np.ndarray:
        """Digests of the engine's tensors of linears in four bits. Those of a layer are copied at a time."""
        layer = lambda linear: layer_of(linear.parts[0][0] + ".")
        by_layer = itertools.groupby(opened(self._engine).linears, layer)
        found = []
        for _, linears in by_layer:
            tensors: dict[str, Any] = {}
            for linear in linears:
                tensors |= linear.live()
            found.append(live_digests(tensors))
        return np.concatenate(found)

    def _compare_live(self) -> None:
        assert self._proven
        if changed := int((self._live() != self._proven.live).any(1).sum()):
            raise PublishFailed(f"{changed} of {len(self._proven.live)} of the engine's tensors in four bits "
                                "have changed since they were proven", ANEW)


@dataclasses.dataclass(frozen=True)
class _Part:
    """WeightSource of those tensors of a source that are `among` the names, or of the others."""

    source: WeightSource
    names: set[str]
    among: bool

    def manifest(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for meta in self.source.manifest() if (meta.name in self.names) == self.among)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return (pair for pair in self.source if (pair[0] in self.names) == self.among)


def _digests(source: _Part) -> dict[str, list[int]]:
    metas = source.manifest()
    sent = Sent({meta.name: i for i, meta in enumerate(metas)})
    for part in layers(source, metas):
        sent.digest(part)
        part.clear()
    sent.join()
    return dict(zip((meta.name for meta in metas), sent.digests().tolist()))


def _compare(name: str, have: Any, want: Any, linear: Linear) -> None:
    """Raise PublishFailed unless the engine's numbers are the source's, both torch tensors of one shape."""
    import torch

    want = want.float()
    bound = 0.0 if torch.equal(want.bfloat16().float(), want) else ROUNDINGS
    wrong = ~((have.float() - want).abs() <= bound * want.abs())
    if count := int(wrong.sum()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise PublishFailed(
            f"{name} is not the source's: {count} of {wrong.numel()} numbers differ, first at row {at[0]} "
            f"{have[at].item():g} in the engine, {want[at].item():g} in the source (vLLM's kernel: "
            f"{kernel(linear)})",
            "do both read the same folder? If so, quantise the BF16 checkpoint again (jaxfp8rl quantize), "
            'since a kernel may read small scales as 0; or set rollout.engine = "jax"')
