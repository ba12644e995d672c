"""The numpy engine with faults, which a test sets and resets."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from bridges.api import Completion, ParamMeta
from bridges.engines.fake_engine import Draft, FakeEngine, FakeTransport


@dataclasses.dataclass
class Faults:
    """The defaults are a healthy engine.

    logprobs: every completion returns none, one too few, or a NaN in the middle.
    die_at_tensor: a publish fails before the tensor with this index.
    drop_tensor: the tensor with this name is not stored. Only a transport with proof notices.
    stale_version: a publish loads the weights, but the engine reports the version before.
    stale_cache: a publish does not reset the prefix cache.
    """

    logprobs: Literal["", "missing", "short", "nan"] = ""
    die_at_tensor: int | None = None
    drop_tensor: str | None = None
    stale_version: bool = False
    stale_cache: bool = False


class FaultyEngine(FakeEngine):
    def __init__(self, *args, faults: Faults | None = None, **options):
        super().__init__(*args, **options)
        self.faults = faults or Faults()

    def _completion(self, d: Draft) -> Completion:
        done, how = super()._completion(d), self.faults.logprobs
        if how == "nan":
            done.logprobs[len(done.logprobs) // 2] = np.nan
        kept = {"missing": None, "short": done.logprobs[:-1]}.get(how, done.logprobs)
        done = dataclasses.replace(done, logprobs=kept)
        self._sick = d.done and done.problem() or self._sick
        return done

    def commit(self, version: int, digest: str) -> tuple[str, ...]:
        cache = dict(self._cache)
        caches = super().commit(version - self.faults.stale_version, digest)
        if not self.faults.stale_cache:
            return caches
        self._cache |= cache
        return ()


class FaultyTransport(FakeTransport):
    """WeightTransport into a FaultyEngine."""

    def _send(self, engine: FaultyEngine, meta: ParamMeta, name: str, buffer: np.ndarray) -> np.ndarray:
        names = [m.name for m in engine.expected_manifest()]
        if (at := engine.faults.die_at_tensor) is not None and meta.name == names[at]:
            raise ConnectionError(f"the link died at tensor {at}")
        before = engine.weight(meta.name)
        sent = super()._send(engine, meta, name, buffer)
        if name == engine.faults.drop_tensor:
            engine.store(name, before)
        return sent
