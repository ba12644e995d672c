"""Drawing tokens from logits, each row in its own way."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Filters(NamedTuple):
    """What a program is compiled for. likeliest: how many tokens any filter looks at, 0 if there is no filter.
    support: Completion.support_ids of so many tokens at most, 0 for none."""

    likeliest: int = 0
    support: int = 0


def draw(logits: Array, order: Any, drawn: Array, filters: Filters) -> tuple[Array, Array, Array | None]:
    """A token of each row of logits [R, V] -> (tokens [R] int32, log-probabilities [R], the tokens that filters
    left [R, support + 1] or None).

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


def filter_logits(logits: Array, top_k: Array, top_p: Array, likeliest: int) -> Array:
    """Logits [R, V] with everything outside the top_k [R] largest (0: off), then outside the top_p [R] nucleus
    (1: off), at -inf. No filter looks beyond the `likeliest` tokens.

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
