"""Publish weights into the embedded engine, with the same names, layout and manifest as into any other
engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridges.api import (
    BridgeError,
    Constant,
    ParamMeta,
    PublishReceipt,
    RolloutEngine,
    StackRow,
    WeightSource,
)
from bridges.engines.embedded_engine import EmbeddedEngine
from bridges.proof import manifest
from bridges.proof.publishing import check_adapter, check_held, failing, receipt


class EmbeddedTransport:
    """AdapterTransport into an EmbeddedEngine of this process. It copies the source's buffers, but not those
    that are `Constant`: of these the engine holds the source's own, and a publish of nothing else moves no
    byte."""

    def open(self, engine: RolloutEngine) -> None:
        """Raises BridgeError for an engine that is not an EmbeddedEngine."""
        if not isinstance(engine, EmbeddedEngine):
            raise BridgeError(f"EmbeddedTransport loads an EmbeddedEngine, not a {type(engine).__name__}",
                              "choose its own transport")
        self._engine = engine

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Copy the weights of `source` into the engine. Raises ManifestMismatch before a byte moves, and
        PublishFailed later, which leaves the engine dirty."""
        engine, start, metas = self._engine, time.perf_counter(), source.manifest()
        manifest.check(metas, engine.expected_manifest())
        engine.state.begin(version)
        with failing(f"version {version} broke off"):
            tensors, copied = {}, []
            for m, (name, buffer) in zip(metas, source, strict=True):
                tensors[m.name] = _checked(m, name, buffer)
                if not isinstance(buffer, Constant):
                    copied.append(m)
            engine.load(jax.block_until_ready(tensors))
            _check_scales(metas, tensors)
        made = receipt(metas, version, start, engine.commit(version, manifest.digest(metas)))
        return dataclasses.replace(made, tensors=len(copied), bytes=manifest.nbytes(copied))

    def publish_adapter(self, name: str, source: WeightSource, version: int) -> PublishReceipt:
        """Copy an adapter into a slot. A publish of weights drops it.

        Raises BridgeError before the first publish, while the adapter is in flight, and if no slot is free;
        ManifestMismatch before a byte moves; PublishFailed later, which leaves the engine as it was.
        """
        engine, start, metas = self._engine, time.perf_counter(), source.manifest()
        check_adapter(name, engine.weight_version())
        slot = engine.place(name)
        manifest.check(metas, engine.adapter_manifest())
        with failing(f"adapter {name!r}, version {version}, broke off",
                     "repair the source and publish it again"):
            tensors = {m.name: _checked(m, *pair) for m, pair in zip(metas, source, strict=True)}
            engine.load_adapter(name, slot, jax.block_until_ready(tensors), version)
        return receipt(metas, version, start, ())

    def drop_adapter(self, name: str) -> None:
        """Raises ValueError for an adapter that is not held, BridgeError while it is in flight."""
        self._engine.drop_adapter(name)

    def verify(self, receipt: PublishReceipt) -> None:
        """Raise PublishFailed if the engine is dirty or holds another publish than the receipt's."""
        check_held((self._engine.state.version, self._engine.state.digest, ""), receipt)

    def close(self) -> None:
        """Nothing is held."""


@jax.jit
def _row(stack: jax.Array, index: tuple) -> jax.Array:
    return stack[index]


def _checked(meta: ParamMeta, name: str, buffer: Any) -> Any:
    """A copy of a checked buffer, since the learner may donate its own; of a Constant what it holds."""
    if isinstance(buffer, Constant):
        manifest.check_tensor(meta, name, str(buffer.buffer.dtype), buffer.buffer.shape)
        return buffer.buffer
    if not isinstance(buffer, (jax.Array, np.ndarray, np.generic, StackRow)):
        buffer = jax.dlpack.from_dlpack(buffer)
    manifest.check_tensor(meta, name, str(buffer.dtype), buffer.shape)
    if isinstance(buffer, StackRow):
        return _row(buffer.stack, tuple(map(np.int32, np.atleast_1d(buffer.index))))
    return jnp.array(buffer)


def _check_scales(metas: Sequence[ParamMeta], tensors: Mapping[str, jax.Array | StackRow]) -> None:
    scales = {m.name: tensors[m.name] for m in metas if m.role != "weight"}
    arrays = [x.stack if isinstance(x, StackRow) else x for x in scales.values()]
    if not _sound(list({id(a): a for a in arrays}.values())):  # one wait for all
        name = next(name for name, x in scales.items() if not _sound([jnp.asarray(np.asarray(x))]))
        raise ValueError(f"{name} holds a scale that is not positive and finite")


@jax.jit
def _sound(scales: list[jax.Array]) -> jax.Array:
    """Whether all scales are positive and finite: a bool [] on the device."""
    return jnp.array([jnp.all((s > 0) & jnp.isfinite(s)) for s in scales] or [True]).all()
