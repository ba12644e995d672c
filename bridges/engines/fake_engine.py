"""A small real engine and transport in numpy, for tests of code that uses an engine.

It is `InFlight`: a publish interrupts its completions, and each token is sampled by the weights of its
moment. A completion that a checkpoint has interrupted goes on as if nothing had happened, bit for bit.

The model is a bigram: logits [V] of the next token = lm_head [V, D] @ embed_tokens [V, D][last token]. The
weights therefore matter, the log-probabilities are real, and there is a prefix cache (logits by last token)
that a faulty publish can forget to reset.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineFormats,
    FinishReason,
    GenRequest,
    Health,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    SamplingParams,
    WeightSource,
    spans,
)
from bridges.engines.weight_state import WeightState
from bridges.proof import manifest
from bridges.proof.publishing import check_held, failing, opened, receipt

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass
class Draft:
    """A completion while it is sampled. `reason`: why it has ended, or ""."""

    request: GenRequest
    index: int
    rng: np.random.Generator
    reply: list[int] | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    supports: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    reason: FinishReason | Literal[""] = ""

    @property
    def done(self) -> bool:
        return bool(self.reason)

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt_token_ids[-1]

    def add(self, token: int, logprob: float, support: np.ndarray, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.supports.append(support)
        self.versions.append(version)
        if token in self.request.sampling.stop_token_ids:
            self.reason = "stop"
        elif len(self.tokens) == (len(self.reply) if self.reply else self.request.sampling.max_tokens):
            self.reason = "length"

    def going_on(self, begun: Completion) -> Draft:
        """The draft that has sampled the tokens of `begun`, with as many draws behind it."""
        sizes = [0] * len(begun.token_ids) if begun.support_sizes is None else begun.support_sizes
        ids = np.zeros(0, np.int32) if begun.support_ids is None else begun.support_ids
        versions = [s.version for s in begun.version_spans for _ in range(s.start, s.stop)]
        among = np.split(ids, np.cumsum(sizes)[:-1]) if len(sizes) else []
        for token, logprob, support, version in zip(begun.token_ids, begun.logprobs, among, versions):
            self.rng.random()
            self.add(int(token), logprob, support, version)
        return self


class FakeEngine:
    """RolloutEngine over the bigram model. The first completions are the `replies`, in order; the rest are
    sampled.

    slots: the number of completions that `poll` advances by a token, the oldest first. manifest: that of a
    larger model, of which embed_tokens and lm_head (or the same, where it is tied) are sampled from.
    """

    def __init__(self, vocab_size: int = 64, width: int = 8, *, max_model_len: int = 256,
                 replies: Sequence[Sequence[int]] = (), seed: int = 0, slots: int = 64,
                 manifest: Sequence[ParamMeta] = ()):
        shape = (vocab_size, width)
        own = ParamMeta(EMBED, "float32", shape), ParamMeta(HEAD, "float32", shape)
        self._manifest = tuple(manifest) or own
        self._drafts: dict[str, list[Draft]] = {}
        self._slots, self._paused = slots, False
        self.state = WeightState()
        self._weights = {m.name: np.zeros(m.shape, np.float32) for m in self._manifest}
        self._replies, self._rng = [list(r) for r in replies], np.random.default_rng(seed)
        self._cache: dict[int, np.ndarray] = {}
        self._sick = ""
        formats = EngineFormats("float32", "float32", "float32", "float32")
        self._capabilities = Capabilities("fake", "1", formats, max_model_len, vocab_size, seeds=True,
                                          support=True)

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        self.state.require_clean()
        for r in requests:
            self._capabilities.check(r)
        return [[self._complete(r, i) for i in range(r.n)] for r in requests]

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None:
        self.state.require_clean()
        for r, so_far in itertools.zip_longest(requests, begun, fillvalue=()):
            assert isinstance(r, GenRequest)
            self._capabilities.check(r)
            self._drafts[r.request_id] = [self._draft(r, i, so_far[i] if so_far else None)
                                          for i in range(r.n)]

    def poll(self) -> list[list[Completion]]:
        """Advance the oldest completions by a token each."""
        self.state.require_clean()
        if self._paused:
            return []
        going = [d for drafts in self._drafts.values() for d in drafts if not d.done]
        for draft in sorted(going, key=self.turn)[: self._slots]:
            self._advance(draft)
        done = [name for name, drafts in self._drafts.items() if all(d.done for d in drafts)]
        return [[self._completion(d) for d in self._drafts.pop(name)] for name in done]

    def turn(self, draft: Draft) -> int:
        """Which completions come first when they are more than the slots: the smallest number, then the
        oldest. A test may override it."""
        return 0

    def partial(self) -> dict[str, list[Completion]]:
        return {name: [self._completion(d) for d in drafts] for name, drafts in self._drafts.items()}

    def cancel(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            self._drafts.pop(name, None)

    def _draft(self, r: GenRequest, index: int, begun: Completion | None = None) -> Draft:
        rng = self._rng if r.seed is None else np.random.default_rng([r.seed, index])
        draft = Draft(r, index, rng, self._replies.pop(0) if self._replies else None)
        return draft.going_on(begun) if begun else draft

    def _complete(self, r: GenRequest, index: int) -> Completion:
        draft = self._draft(r, index)
        while not draft.done:
            self._advance(draft)
        return self._completion(draft)

    def _advance(self, d: Draft) -> None:
        """Sample the next token of a completion."""
        logp, reported = self._distributions(d.last, d.request.sampling)
        token = d.reply[len(d.tokens)] if d.reply else int(d.rng.choice(len(logp), p=np.exp(logp)))
        d.add(token, reported[token], np.flatnonzero(np.isfinite(reported)).astype(np.int32),
              self.state.current())

    def _completion(self, d: Draft) -> Completion:
        ids, logprobs = np.asarray(d.tokens, np.int32), np.asarray(d.logprobs, np.float32)
        among = _reported(d.supports, d.request.sampling.reported)
        reason = d.reason or "abort"
        done = Completion(d.request.request_id, d.index, ids, logprobs, reason, spans(d.versions), None,
                          *among)
        if d.done:
            self._sick = done.problem() or self._sick
        return done

    def _distributions(self, last: int, s: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities [V] float64 to draw from, and those to report: greedy reports temperature 1."""
        if last not in self._cache:
            head = self._weights.get(HEAD, self._weights[EMBED])
            self._cache[last] = (head @ self._weights[EMBED][last]).astype(np.float64)
        logits = self._cache[last]
        if s.temperature == 0:
            return np.where(np.arange(len(logits)) == logits.argmax(), 0.0, -np.inf), _log_softmax(logits)
        logp = _filtered(logits / s.temperature, s.top_k, s.top_p)
        return logp, logp

    def pause(self, keep_cache: bool = True) -> None:
        """`poll` samples nothing until `resume`. A bigram has no keys and values to keep."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def wake(self) -> None:
        """Nothing to restore."""

    def sleep(self) -> None:
        self.state.drop("sleep() dropped its weights")

    def health(self) -> Health:
        return Health(not self._sick, self._sick)

    def weight_version(self) -> int | None:
        return self.state.version

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        return self._manifest

    def weight(self, name: str) -> np.ndarray:
        return self._weights[name]

    def store(self, name: str, value: np.ndarray) -> None:
        self._weights[name] = value

    def commit(self, version: int, digest: str) -> tuple[str, ...]:
        self._sick = ""
        self.state.commit(version, digest)
        self._cache.clear()
        return ("prefix",)

    def content(self) -> str:
        """SHA-256 of the engine's weights."""
        return hashlib.sha256(b"".join(self._weights[m.name].tobytes() for m in self._manifest)).hexdigest()

    def close(self) -> None:
        self.state.drop("the engine is closed")


class FakeTransport:
    """WeightTransport into a `FakeEngine`.

    proof: after a publish, compare the engine's weights with those that were sent.
    """

    def __init__(self, proof: bool = False):
        self._proof = proof
        self._engine: FakeEngine | None = None

    def open(self, engine: RolloutEngine) -> None:
        """Raises BridgeError for an engine that is not a FakeEngine."""
        if not isinstance(engine, FakeEngine):
            raise BridgeError(f"FakeTransport loads a FakeEngine, not a {type(engine).__name__}",
                              "choose its own transport")
        self._engine = engine

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        engine, metas = opened(self._engine), source.manifest()
        manifest.check(metas, engine.expected_manifest())
        start, sent = time.perf_counter(), {}
        engine.state.begin(version)
        with failing(f"version {version} broke off"):
            for meta, (name, buffer) in zip(metas, source, strict=True):
                sent[name] = self._send(engine, meta, name, buffer)
        if self._proof and (lost := [n for n, value in sent.items()
                                     if not np.array_equal(engine.weight(n), value)]):
            raise PublishFailed(f"version {version} did not arrive: {lost[0]} differs from the tensor sent",
                                "publish again")
        content = engine.content() if self._proof else ""
        return receipt(metas, version, start, engine.commit(version, manifest.digest(metas)), content)

    def _send(self, engine: FakeEngine, meta: ParamMeta, name: str, buffer: np.ndarray) -> np.ndarray:
        value = np.array(np.from_dlpack(buffer))
        manifest.check_tensor(meta, name, value.dtype.name, value.shape)
        engine.store(name, value)
        return value

    def verify(self, receipt: PublishReceipt) -> None:
        engine = opened(self._engine)
        content = engine.content() if self._proof else ""
        check_held((engine.state.version, engine.state.digest, content), receipt)

    def close(self) -> None:
        self._engine = None


def _reported(supports: list[np.ndarray], most: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """support_ids and support_sizes of a completion."""
    if not most:
        return None, None
    known = [s if len(s) <= most else s[:0] for s in supports]
    return np.concatenate(known), np.array([len(s) for s in known], np.int32)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _filtered(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Log-probabilities [V] after keeping the `top_k` largest (0: all), then the smallest set that holds
    `top_p`."""
    order = np.argsort(-logits, kind="stable")
    if top_k:
        logits = _only(logits, order[:top_k])
    before = np.cumsum(np.exp(_log_softmax(logits))[order]) - np.exp(_log_softmax(logits))[order]
    return _log_softmax(_only(logits, order[before < top_p]))


def _only(logits: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(np.isin(np.arange(len(logits)), keep), logits, -np.inf)
