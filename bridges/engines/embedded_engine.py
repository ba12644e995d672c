"""The embedded engine: continuous batching in JAX, for a model given as a few functions.

It is the default engine and runs everywhere. It is also the reference for the others, since its
log-probabilities come from the same functions as the learner's. Prompts are computed once for all their
completions; keys and values lie in pages; a row whose sequence stops decodes the next one. Numbers of rows
and lengths are rounded up to buckets, so that a long run stops compiling. `bridges.engines.batch` is the part
on the device, `bridges.engines.flights` that on the host.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from bridges.admission import ADMIT, Admission
from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineFormats,
    GenRequest,
    Health,
    ParamMeta,
)
from bridges.engines.draw import Parts
from bridges.engines.flight import Flight
from bridges.engines.flights import Flights
from bridges.engines.weight_state import WeightState
from bridges.order import HOW, PATIENCE, Order

STEPS = 64  # tokens of a row between two looks of the host
MOMENT = 4  # the same, where the caller may interrupt


@dataclasses.dataclass(frozen=True)
class NamedAdapters:
    """How a model holds adapters by name, in slots 1 to `count` beside slot 0, which is that of its weights.

    manifest: of one adapter. put: (params, slot, its tensors by name, or None for zeros) -> params. choose:
    (params, slots [B, T]) -> params for these tokens.
    """

    count: int
    manifest: tuple[ParamMeta, ...]
    put: Callable[[Any, int, Mapping[str, Array] | None], Any]
    choose: Callable[[Any, Array], Any]


@dataclasses.dataclass(frozen=True)
class EngineModel:
    """The model's functions that the engine calls. R rows, B packed rows of T tokens, P pages, M pages of a
    row, D width, V vocabulary.

    manifest: the tensors to load. assemble: (name -> array) -> params. page: the number of slots of a page.
    init_cache: P -> cache, whose leaves are [L, P, page, ...].
    prefill: (params, tokens [B, T], positions, segments, pages, cache) -> (hidden [B, T, D], cache). A token
        sees the earlier ones of its segment. It writes the slot position % page of its page, [B, T]; P writes
        nothing.
    decode: (params, tokens [R], positions [R], table [R, M], cache) -> (hidden [R, D], cache). A token writes
        the slot of its position, then sees the slots up to it.
    logits: (params, hidden [R, D]) -> [R, V] float32.
    parts: draws without logits, where nothing is filtered; None for a model that has no such head.
    draft: (params, hidden [R, D], tokens [R] drawn from it) -> the hidden states after these tokens, guessed
        [R, D]; None: drafts are looked for in what was written before (bridges.engines.speculate).
    routes: (cache, pages [...], positions [...]) -> [..., L, k], the experts of the tokens in these slots,
        for a model with mixtures of experts.
    adapters: of a model that holds several; `assemble` gives zeros in their slots.
    """

    manifest: tuple[ParamMeta, ...]
    assemble: Callable[[Mapping[str, Array]], Any]
    init_cache: Callable[[int], Any]
    prefill: Callable[..., tuple[Array, Any]]
    decode: Callable[..., tuple[Array, Any]]
    logits: Callable[[Any, Array], Array]
    formats: EngineFormats
    vocab_size: int
    page: int = 16
    routes: Callable[[Any, Array, Array], Array] | None = None
    parts: Parts | None = None
    adapters: NamedAdapters | None = None
    draft: Callable[[Any, Array, Array], Array] | None = None


class EmbeddedEngine:
    """RolloutEngine over an EngineModel, and InFlight. Dirty until the first publish; seeds reproduce samples
    bit for bit. Calls may come from several threads; what they ask for is decoded together.

    max_num_seqs: rows decoded at once. pages: of the cache; None for as many as these rows can fill.
    min_num_seqs: sequences that the smallest batch has room for. drafts: tokens of a sequence that idle rows
    verify at once, at most (bridges.engines.speculate); 0 for none.
    order: in which completions start where they are more than rows (bridges.order). admit: "cache" starts
    those whose keys and values are expected to fit (bridges.admission).
    """

    def __init__(self, model: EngineModel, *, max_model_len: int, max_num_seqs: int = 256, seed: int = 0,
                 pages: int | None = None, min_num_seqs: int = 1, drafts: int = 0,
                 order: HOW = "fifo", admit: ADMIT = "all"):
        self._model, self._max_len = model, max_model_len
        self._stream = np.random.default_rng(seed)
        self._params: Any = None
        self._named: dict[str, tuple[int, int]] = {}  # adapter -> (its slot, its version)
        self.state, self._problem = WeightState(), ""
        self._flights = Flights(model, max_model_len, max_num_seqs, pages, min_num_seqs, drafts,
                                Order(order, PATIENCE * max_num_seqs),
                                Admission(model.page) if admit == "cache" else None)
        self._drafts, self._told, self._limited = drafts, np.zeros(3, int), pages is not None
        self._groups: dict[str, list[Flight]] = {}  # those submitted
        self._paused = False
        self._lock = threading.RLock()  # a run evaluates while it samples ahead

    def capabilities(self) -> Capabilities:
        m = self._model
        routes = m.routes is not None
        return Capabilities("jax", jax.__version__, m.formats, self._max_len, m.vocab_size, True, routes,
                            support=True, adapters=m.adapters.count if m.adapters else 0)

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """n completions for each request, in order. Raises EngineDirty, or ValueError for a request that does
        not fit. At temperature 0, the log-probabilities are those at temperature 1."""
        self.state.require_clean()
        for r in requests:
            self._check(r)
        with self._lock:
            groups = [self._begin(r) for r in requests]
        try:
            while self._go_on(groups):
                pass
        except BaseException:
            with self._lock:
                self._flights.cancel([f for g in groups for f in g if not f.done])
            raise
        return [self._result(g) for g in groups]

    def _go_on(self, groups: Sequence[Sequence[Flight]]) -> bool:
        """Sample, if some of these are not done; False if all are."""
        with self._lock:
            going = [f.request.sampling.max_tokens for g in groups for f in g if not f.done]
            if going:
                self._advance(min(STEPS, max(going)))
            return bool(going)

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None:
        """See InFlight. Raises EngineDirty, or ValueError for a request that does not fit."""
        self.state.require_clean()
        for r in requests:
            self._check(r)
        with self._lock:
            for i, r in enumerate(requests):
                self._groups[r.request_id] = self._begin(r, begun[i] if i < len(begun) else ())

    def poll(self) -> list[list[Completion]]:
        """See InFlight."""
        with self._lock:
            if not self._paused and any(not f.done for g in self._groups.values() for f in g):
                self._advance(MOMENT)
            ready = [name for name, g in self._groups.items() if all(f.done for f in g)]
            return [self._result(self._groups.pop(name)) for name in ready]

    def partial(self) -> dict[str, list[Completion]]:
        """See InFlight."""
        with self._lock:
            return {name: [f.done or self._flights.so_far(f) for f in g]
                    for name, g in self._groups.items()}

    def cancel(self, request_ids: Sequence[str]) -> None:
        """See InFlight."""
        with self._lock:
            gone = [self._groups.pop(name) for name in request_ids if name in self._groups]
            self._flights.cancel([f for g in gone for f in g if not f.done])

    def _begin(self, r: GenRequest, begun: Sequence[Completion] = ()) -> list[Flight]:
        seeds = [(r.seed & 0xFFFFFFFF, j) if r.seed is not None else
                 tuple(self._stream.integers(2**32, size=2).tolist()) for j in range(r.n)]
        return self._flights.submit(r, seeds, begun, self._named.get(r.adapter))

    def _advance(self, steps: int) -> None:
        self._flights.advance(self._params, self.state.current(), steps)

    def _result(self, group: Sequence[Flight]) -> list[Completion]:
        done = [f.done for f in group if f.done]
        for c in done:
            if problem := c.problem():
                self._problem = f"request {c.request_id!r}, completion {c.index}: {problem}"
        return done

    def load(self, tensors: Mapping[str, Array]) -> None:
        """Replace all weights, and drop the adapters that are held by name. The engine stays dirty until
        `commit`. Raises BridgeError while one of these is in flight."""
        with self._lock:
            for name, (slot, _) in self._named.items():
                self._require_idle(name, slot)
            self._named.clear()
            self._params = self._model.assemble(tensors)

    def place(self, name: str) -> int:
        """The slot of the adapter `name`, a free one if it has none. Raises BridgeError while it is in
        flight, and if no slot is free."""
        if self._model.adapters is None:
            raise BridgeError(f"adapter {name!r}: this engine holds none by name",
                              "build it for several adapters")
        if name in self._named:
            self._require_idle(name, self._named[name][0])
            return self._named[name][0]
        taken = {slot for slot, _ in self._named.values()}
        free = [slot for slot in range(1, self._model.adapters.count + 1) if slot not in taken]
        if not free:
            raise BridgeError(f"adapter {name!r}: all {self._model.adapters.count} slots are taken, by "
                              f"{', '.join(map(repr, self._named))}",
                              "drop one of these first, or build the engine for more")
        return free[0]

    def adapter_manifest(self) -> tuple[ParamMeta, ...]:
        """The tensors of one adapter."""
        return self._model.adapters.manifest if self._model.adapters else ()

    def load_adapter(self, name: str, slot: int, tensors: Mapping[str, Array] | None,
                     version: int = 0) -> None:
        """Put an adapter into its slot, or with None for `tensors` take it out."""
        assert self._model.adapters is not None
        with self._lock:
            self._require_idle(name, slot)
            self._named.pop(name, None)
            self._params = self._model.adapters.put(self._params, slot, tensors)
            if tensors is not None:
                self._named[name] = slot, version

    def drop_adapter(self, name: str) -> None:
        """Raises ValueError for an adapter that is not held, BridgeError while it is in flight."""
        self.load_adapter(name, self._slot_of(name), None)

    def _slot_of(self, name: str) -> int:
        if name not in self._named:
            held = ", ".join(map(repr, self._named)) or "none by name"
            raise ValueError(f"adapter {name!r} is not in the engine, which holds {held}")
        return self._named[name][0]

    def _require_idle(self, name: str, slot: int) -> None:
        if self._flights.uses(slot):
            raise BridgeError(f"adapter {name!r} is in flight", "wait for its completions, or cancel them")

    def commit(self, version: int, digest: str) -> tuple[str, ...]:
        """Declare `version` current. Returns the caches dropped: no key or value is left unless completions
        are in flight, and no later completion reads one that is."""
        with self._lock:
            self.state.commit(version, digest)
            self._flights.change(version)
        self._problem = ""
        return ("kv_cache",)

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        return self._model.manifest

    def pause(self, keep_cache: bool = True) -> None:
        """See InFlight. Between calls nothing runs."""
        with self._lock:
            self._paused = True
            if not keep_cache:
                self._flights.recompute()

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        """Drop the weights, and keys and values; `wake` needs a publish to follow."""
        with self._lock:
            self._flights.recompute()
            self._params = None
            self._named.clear()
            self.state.drop("sleep() dropped its weights")

    def wake(self) -> None:
        """Nothing to restore: the publish that must follow allocates the memory."""

    def health(self) -> Health:
        return Health(not self._problem, self._problem)

    def metrics(self) -> dict[str, float]:
        """Since it was last asked: of the drafts, if it makes some, and of the cache, if `pages` limits it.
        accepted: the share of drafts. tokens: of a row and step that had drafts, on average."""
        with self._lock:
            return (self._of_drafts() if self._drafts else {}) | (
                self._flights.seen.metrics() if self._limited else {})

    def _of_drafts(self) -> dict[str, float]:
        now, self._told = self._flights.counted.copy(), self._flights.counted.copy() - self._told
        tried, drafted, accepted = map(int, self._told)
        self._told = now
        return {"speculation/drafted": drafted, "speculation/accepted": accepted / max(drafted, 1),
                "speculation/tokens": 1 + accepted / max(tried, 1)}

    def weight_version(self) -> int | None:
        return self.state.version

    def close(self) -> None:
        with self._lock:
            self._flights.cancel([f for g in self._groups.values() for f in g])
            self._groups.clear()
            self._params = None
            self.state.drop("the engine is closed")

    def _check(self, r: GenRequest) -> None:
        if r.adapter:
            self._slot_of(r.adapter)
        self.capabilities().check(r)
