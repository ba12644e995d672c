"""Drawing tokens from logits, each row in its own way.

A head that keeps no logits gives a token in two steps: a part of PART words is drawn by the parts'
probabilities, then a word of it by its own. An engine that has such a head draws so from all logits, too,
where a neighbour's filters need them, so that a seed draws the same token beside any neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

PART = 256  # words


class Filters(NamedTuple):
    """What a program is compiled for. likeliest: how many tokens any filter looks at, 0 if there is no
    filter. support: Completion.support_ids of so many tokens at most, 0 for none."""

    likeliest: int = 0
    support: int = 0


class Parts(NamedTuple):
    """A head that keeps no logits; P parts of PART words, the last of which may have fewer.

    statistics: (params, hidden [R, D], inverse_temperature [R]) -> of logits times it (the largest, and the
        sum of exponentials of what they are below that), [P, R] each.
    logits: (params, hidden, part [R]) -> [R, PART] of the words of a part, -inf for what is no word.
    logprob: (logits times inverse_temperature [R] of the words that were drawn, what statistics gave) ->
        their log-probabilities [R], where a learner computes the same to the last bit; None: a sum in any
        order.
    """

    statistics: Callable[[Any, Array, Array], tuple[Array, ...]]
    logits: Callable[[Any, Array, Array], Array]
    logprob: Callable[[Array, Array, Array], Array] | None = None


def draw(logits: Array, order: Any, drawn: Array, filters: Filters) -> tuple[Array, Array, Array | None]:
    """A token of each row of logits [R, V] -> (tokens [R] int32, log-probabilities [R], the tokens that
    filters left [R, support + 1] or None).

    order: temperature, top_k, top_p, greedy [R] and seed [R, 2] of the rows. drawn [R]: the number of tokens
    that each has drawn, which together with its seed gives its random numbers.
    """
    logits = logits / order.temperature[:, None]
    if filters.likeliest:
        logits = filter_logits(logits, order.top_k, order.top_p, filters.likeliest)
    keys = jax.vmap(lambda s, t: jax.random.fold_in(jax.random.fold_in(jax.random.key(s[0]), s[1]), t))(
        order.seed, drawn)
    token = jnp.where(order.greedy, jnp.argmax(logits, -1), jax.vmap(jax.random.categorical)(keys, logits))
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], -1)[:, 0]
    return token.astype(jnp.int32), logp, _left(logits, filters.support)


def draw_in_two(logits: Array, order: Any, drawn: Array,
                filters: Filters) -> tuple[Array, Array, Array | None]:
    """`draw`, with other random numbers: those of `draw_by_parts`."""
    logits = logits * (1 / order.temperature)[:, None]
    if filters.likeliest:
        logits = filter_logits(logits, order.top_k, order.top_p, filters.likeliest)
    rows = len(logits)
    parts = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % PART)),
                    constant_values=-jnp.inf).reshape(rows, -1, PART)
    highest = jnp.max(parts, 2)
    some = jnp.where(jnp.isfinite(highest), highest, 0)
    total = jnp.sum(jnp.exp(parts - some[..., None]), 2)
    token, logp = _drawn(highest.T, total.T, lambda part: parts[jnp.arange(rows), part], order, drawn)
    return token, logp, _left(logits, filters.support)


def draw_by_parts(parts: Parts, params: Any, hidden: Array, order: Any, drawn: Array) -> tuple[Array, Array]:
    """`draw_in_two` without filters by a head that keeps no logits: hidden [R, D] -> (tokens [R],
    log-probabilities [R])."""
    inverse = 1 / order.temperature
    highest, total = parts.statistics(params, hidden, inverse)
    words = lambda part: parts.logits(params, hidden, part) * inverse[:, None]
    return _drawn(highest, total, words, order, drawn, parts.logprob or _logprob)


def logprob_of(parts: Parts, params: Any, hidden: Array, order: Any, token: Array) -> Array:
    """The log-probabilities [R] of tokens by a head that has `logprob`."""
    assert parts.logprob is not None
    inverse = 1 / order.temperature
    highest, total = parts.statistics(params, hidden, inverse)
    words = parts.logits(params, hidden, token // PART) * inverse[:, None]
    return parts.logprob(jnp.take_along_axis(words, token[:, None] % PART, 1)[:, 0], highest, total)


def _logprob(z: Array, highest: Array, total: Array) -> Array:
    """The log-probabilities [R] of words with logits z [R] by the statistics of parts [P, R]."""
    top = jnp.max(highest, 0)
    return z - top - jnp.log(jnp.sum(total * jnp.exp(highest - top), 0))


def _drawn(highest: Array, total: Array, words_of: Callable[[Array], Array], order: Any, drawn: Array,
           logprob: Callable[[Array, Array, Array], Array] = _logprob) -> tuple[Array, Array]:
    """Tokens and log-probabilities [R] by the statistics of parts [P, R] and words_of(part [R]) -> their
    logits."""
    keys = jax.vmap(lambda s, t: jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.key(s[0]),
                                                                                        s[1]), t)))(
        order.seed, drawn)
    choose = lambda of, greedily, by: jnp.where(order.greedy, jnp.argmax(greedily, -1),
                                                jax.vmap(jax.random.categorical)(keys[:, of], by))
    part = choose(0, highest.T, (highest + jnp.log(total)).T)
    words = words_of(part)
    word = choose(1, words, words)
    logp = logprob(jnp.take_along_axis(words, word[:, None], -1)[:, 0], highest, total)
    return (part * PART + word).astype(jnp.int32), logp


def filter_logits(logits: Array, top_k: Array, top_p: Array, likeliest: int) -> Array:
    """Logits [R, V] with everything outside the top_k [R] largest (0: off), then outside the top_p [R]
    nucleus (1: off), at -inf. No filter looks beyond the `likeliest` tokens.

    The nucleus is the smallest set of most likely tokens whose probability reaches top_p (Holtzman et al.
    2020); the most likely token always stays. Ties with the smallest kept logit are kept.
    """
    ordered = jax.lax.top_k(logits, min(likeliest, logits.shape[-1]))[0]
    last = jnp.where(top_k > 0, jnp.minimum(top_k, ordered.shape[-1]), ordered.shape[-1]) - 1
    kth = jnp.take_along_axis(ordered, last[:, None], -1)
    ordered = jnp.where((ordered >= kth) | (top_k == 0)[:, None], ordered, -jnp.inf)
    probs = jax.nn.softmax(ordered)
    kept = (jnp.cumsum(probs, -1) - probs < top_p[:, None]) & (ordered > -jnp.inf)
    smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
    smallest = jnp.where((top_p < 1)[:, None], smallest, -jnp.inf)
    unfiltered = (top_k == 0)[:, None]
    return jnp.where(((logits >= kth) | unfiltered) & (logits >= smallest), logits, -jnp.inf)


def _left(logits: Array, support: int) -> Array | None:
    """The likeliest support + 1 tokens of filtered logits [R, V], with -1 for tokens that were filtered out;
    None if `support` is 0."""
    if not support:
        return None
    values, ids = jax.lax.top_k(logits, min(support + 1, logits.shape[-1]))
    return jnp.where(values > -jnp.inf, ids, -1).astype(jnp.int32)
