"""The embedded engine: batched generation in JAX, for a model given as a few functions.

It is the default engine and runs everywhere. It is also the reference for the others, since its
log-probabilities come from the same functions as the learner's. A generate call runs one jitted program per
shape: a prefill of right-padded prompts, then a `while_loop` of single-token steps until every row has
stopped. Rows, prompt lengths and completion lengths are rounded up to buckets, so that a long run stops
compiling. It has neither continuous batching nor paging; use vLLM for those.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.api import (
    Capabilities,
    Completion,
    EngineFormats,
    GenRequest,
    Health,
    ParamMeta,
    SamplingParams,
    supports,
)
from bridges.engines.weight_state import WeightState

ROW_BUCKET, TOKEN_BUCKET = 8, 16


@dataclasses.dataclass(frozen=True)
class EngineModel:
    """The model's functions that the engine calls. B rows, T tokens, S cache slots, D width, V vocabulary.

    manifest: the tensors to load. assemble: (name -> array) -> params. init_cache: (B, S) -> cache. step:
    (params, tokens [B, T], positions [B, T], cache) -> (hidden [B, T, D], cache). It writes each token at
        the cache slot of its position and attends to the slots up to it.
    logits: (params, hidden [B, D]) -> [B, V] float32.
    routes: cache -> [B, S, L, k], the experts of each slot, for a model with mixtures of experts.
    """

    manifest: tuple[ParamMeta, ...]
    assemble: Callable[[Mapping[str, Array]], Any]
    init_cache: Callable[[int, int], Any]
    step: Callable[[Any, Array, Array, Any], tuple[Array, Any]]
    logits: Callable[[Any, Array], Array]
    formats: EngineFormats
    vocab_size: int
    routes: Callable[[Any], Array] | None = None


class JaxEngine:
    """RolloutEngine over an EngineModel. Dirty until the first publish; seeds reproduce samples bit for
    bit."""

    def __init__(self, model: EngineModel, *, max_model_len: int, max_num_seqs: int = 256, seed: int = 0):
        self._model, self._max_len, self._max_rows = model, max_model_len, max_num_seqs
        self._stream = np.random.default_rng(seed)
        self._params: Any = None
        self.state, self._problem = WeightState(), ""
        self._run = jax.jit(
            functools.partial(_generate, model),
            static_argnames=("max_new", "top_k", "nucleus", "greedy", "support"),
            # round and multiply (with cuBLAS) as the learner does
            compiler_options={"xla_allow_excess_precision": False, "xla_gpu_enable_triton_gemm": False},
        )

    def capabilities(self) -> Capabilities:
        m = self._model
        routes = m.routes is not None
        return Capabilities("jax", jax.__version__, m.formats, self._max_len, m.vocab_size, True, routes,
                            support=True)

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """n completions for each request, in order. Raises EngineDirty, or ValueError for a request that does
        not fit. At temperature 0, the log-probabilities are those at temperature 1."""
        self.state.require_clean()
        for r in requests:
            self._check(r)
        results: dict[tuple[int, int], Completion] = {}
        for sampling in dict.fromkeys(r.sampling for r in requests):
            rows = [(i, j) for i, r in enumerate(requests) if r.sampling == sampling for j in range(r.n)]
            for at in range(0, len(rows), self._max_rows):
                results.update(self._batch(requests, rows[at : at + self._max_rows], sampling))
        return [[results[i, j] for j in range(r.n)] for i, r in enumerate(requests)]

    def load(self, tensors: Mapping[str, Array]) -> None:
        """Replace all weights. The engine stays dirty until `commit`."""
        self._params = self._model.assemble(tensors)

    def commit(self, version: int, digest: str) -> tuple[str, ...]:
        """Declare `version` current. Returns the caches dropped: keys and values live only inside a generate
        call."""
        self.state.commit(version, digest)
        self._problem = ""
        return ("kv_cache",)

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        return self._model.manifest

    def pause(self) -> None:
        """Nothing is in flight between calls of an in-process engine."""

    resume = pause

    def sleep(self) -> None:
        """Drop the weights; `wake` needs a publish to follow."""
        self._params = None
        self.state.drop("sleep() dropped its weights")

    def wake(self) -> None:
        """Nothing to restore: the publish that must follow allocates the memory."""

    def health(self) -> Health:
        return Health(not self._problem, self._problem)

    def weight_version(self) -> int | None:
        return self.state.version

    def close(self) -> None:
        self._params = None
        self.state.drop("the engine is closed")

    def _check(self, r: GenRequest) -> None:
        longest = len(r.prompt_token_ids) + r.sampling.max_tokens
        if longest > self._max_len:
            raise ValueError(
                f"request {r.request_id!r}: prompt + max_tokens = {longest} "
                f"exceeds max_model_len {self._max_len}")
        if not 0 <= min(r.prompt_token_ids) <= max(r.prompt_token_ids) < self._model.vocab_size:
            raise ValueError(
                f"request {r.request_id!r}: a token lies outside the vocabulary of {self._model.vocab_size}")

    def _batch(self, requests: Sequence[GenRequest], rows: list[tuple[int, int]], s: SamplingParams):
        """One device program: rows are (request, sample) pairs that share their sampling parameters."""
        prompts = [requests[i].prompt_token_ids for i, _ in rows]
        tokens = np.zeros((_bucket(len(rows), ROW_BUCKET), _bucket(max(map(len, prompts)), TOKEN_BUCKET)),
                          np.int32)
        lengths, seeds = np.zeros(len(tokens), np.int32), np.zeros((len(tokens), 2), np.uint32)
        for row, ((i, j), prompt) in enumerate(zip(rows, prompts)):
            tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            seed = requests[i].seed
            seeds[row] = (seed & 0xFFFFFFFF, j) if seed is not None else self._stream.integers(2**32, size=2)
        stops = np.full(_bucket(len(s.stop_token_ids), 4), -1, np.int32)
        stops[: len(s.stop_token_ids)] = s.stop_token_ids
        out, logp, count, support, routes = self._run(
            self._params, tokens, lengths, seeds, stops, np.float32(s.temperature or 1.0),
            np.float32(s.top_p),
            max_new=_bucket(s.max_tokens, TOKEN_BUCKET), limit=np.int32(s.max_tokens), top_k=s.top_k,
            nucleus=s.top_p < 1, greedy=s.temperature == 0, support=s.reported,
        )
        out, logp, count = np.asarray(out), np.asarray(logp), np.asarray(count)
        for row, (i, j) in enumerate(rows):
            forwarded = len(prompts[row]) + count[row] - 1  # the last token was not an input of the model
            routed = None if routes is None else np.asarray(routes[row, :forwarded])
            among = (None, None) if support is None else supports(
                np.asarray(support[row, : count[row]]), s.reported)
            yield (i, j), self._completion(requests[i], j, out[row, : count[row]], logp[row, : count[row]],
                                           routed, *among)

    def _completion(self, r: GenRequest, index: int, tokens: np.ndarray, logp: np.ndarray,
                    *more) -> Completion:
        if not np.isfinite(logp).all():
            self._problem = (f"request {r.request_id!r}: non-finite log-probability: "
                             "the weights or a kernel are broken")
        reason = "stop" if tokens[-1] in r.sampling.stop_token_ids else "length"
        return Completion(r.request_id, index, tokens, logp, reason, self.state.span(len(tokens)), *more)


def _bucket(n: int, smallest: int) -> int:
    """`n` rounded up to one of smallest * 1, 2, 3, 4, 6, 8, 12, 16, ...: at most a third is padding, and few
    shapes are compiled."""
    size = smallest
    while size < n:
        if size * 3 // 2 >= n and size > smallest:
            return size * 3 // 2
        size *= 2
    return size


def filter_logits(logits: Array, top_k: int, top_p: Array | None) -> Array:
    """Logits [B, V] with everything outside the top_k largest (0: off), then outside the top_p nucleus (None:
    off), at -inf.

    The nucleus is the smallest set of most likely tokens whose probability reaches top_p (Holtzman et al.
    2020); the most likely token always stays. Ties with the smallest kept logit are kept.
    """
    if top_k:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        ordered = jnp.sort(logits, -1, descending=True)
        probs = jax.nn.softmax(ordered)
        kept = jnp.cumsum(probs, -1) - probs < top_p
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return logits


def _generate(
    model: EngineModel, params: Any, prompts: Array, lengths: Array, seeds: Array, stops: Array,
    temperature: Array,
    top_p: Array, limit: Array, *, max_new: int, top_k: int, nucleus: bool, greedy: bool, support: int,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """prompts [B, P] right-padded, lengths [B] (0: an unused row) -> (tokens [B, max_new], logp [B, max_new],
    count [B], left, routes).

    left: the tokens that the filters left for each draw, [B, max_new, support + 1], -1 where there are fewer;
    None if `support` is 0. routes: the experts of all cache slots; None for a model without experts.
    """
    rows, width = prompts.shape
    keys = jax.vmap(lambda s: jax.random.fold_in(jax.random.key(s[0]), s[1]))(seeds)
    positions = jnp.broadcast_to(jnp.arange(width), prompts.shape)
    hidden, cache = model.step(params, prompts, positions, model.init_cache(rows, width + max_new))
    last = hidden[jnp.arange(rows), jnp.maximum(lengths - 1, 0)]

    def draw(last: Array, t: Array) -> tuple[Array, Array, Array | None]:
        logits = filter_logits(model.logits(params, last) / temperature, top_k, top_p if nucleus else None)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
        token = jnp.argmax(logits, -1) if greedy else jax.vmap(jax.random.categorical)(step_keys, logits)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], -1)[:, 0]
        return token.astype(jnp.int32), logp, _left(logits, support)

    def more(carry: tuple) -> Array:
        t, _, _, done, *_ = carry
        return (t < limit) & ~done.all()

    def advance(carry: tuple) -> tuple:
        t, last, cache, done, *drawn, count = carry
        now = token, *_ = draw(last, t)
        drawn = jax.tree.map(lambda before, new: before.at[:, t].set(new), drawn, list(now))
        count += ~done
        done |= (token[:, None] == stops).any(-1)
        hidden, cache = model.step(params, token[:, None], (lengths + t)[:, None], cache)
        return t + 1, hidden[:, 0], cache, done, *drawn, count

    of_each = jax.tree.map(lambda s: jnp.zeros((rows, max_new, *s.shape[1:]), s.dtype),
                           jax.eval_shape(draw, last, jnp.int32(0)))
    empty = jnp.int32(0), last, cache, lengths == 0, *of_each, jnp.zeros(rows, jnp.int32)
    _, _, cache, _, tokens, logp, left, count = jax.lax.while_loop(more, advance, empty)
    return tokens, logp, count, left, model.routes(cache) if model.routes else None


def _left(logits: Array, support: int) -> Array | None:
    """The likeliest support + 1 tokens of filtered logits [B, V], with -1 for tokens that were filtered out;
    None if `support` is 0."""
    if not support:
        return None
    values, ids = jax.lax.top_k(logits, min(support + 1, logits.shape[-1]))
    return jnp.where(values > -jnp.inf, ids, -1).astype(jnp.int32)
