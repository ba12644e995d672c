"""The reduction of a loss per token to one number: five aggregations, each written as a weight per token.

The weights include the denominators of the whole batch. The sum of `scale * loss` is therefore the same for
any split of the batch into micro-batches, rows or devices.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.losses.segments import first_live, segment_total

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_sum_norm",
                "seq_mean_token_mean")


def token_scale(
    mask: Bool[Array, "*B T"], segment_ids: Int[Array, "*B T"], kind: str, horizon: float | None = None,
    weights: Float[Array, "*B T"] | None = None
) -> Float[Array, "*B T"]:
    """mask bool [..., T] of the *whole* batch, segment_ids int [..., T] -> scale float32 [..., T], 0 off the
    mask.

    With N live tokens, S sequences with a live token, and n_i live tokens in sequence i, a live token weighs

    - token_mean: 1/N (DAPO, arXiv 2503.14476, section 3.3)
    - token_sum: 1
    - seq_mean_token_sum: 1/S
    - seq_mean_token_sum_norm: 1/(S horizon), `horizon` a constant of the run, usually the longest response
      (Dr. GRPO, arXiv 2503.20783, section 3)
    - seq_mean_token_mean: 1/(S n_i) (GRPO, arXiv 2402.03300, eq. 3)

    weights float32 [..., T]: factors of the tokens' losses, 0 only where mask is False. They do not change N,
    S and n_i, as in prime-rl, whose denominator counts the tokens with a nonzero weight.

    These are verl's five modes. verl divides by all rows, fully masked ones included; S here counts only
    sequences with a live token. An all-False mask gives zeros. Raises ConfigError for an unknown kind, a
    horizon that is missing or not positive, or a horizon for a kind that has none.
    """
    check_aggregation(kind, horizon)
    scale = _unweighted(mask, segment_ids, kind, horizon)
    return scale if weights is None else jnp.where(mask, scale * weights, 0.0)


def _unweighted(mask: Array, segment_ids: Array, kind: str, horizon: float | None) -> Array:
    live = mask.astype(jnp.float32)
    if kind == "token_sum":
        return live
    if kind == "token_mean":
        return live / _at_least_one(jnp.sum(mask))
    scale = live / _at_least_one(jnp.sum(first_live(mask, segment_ids)))
    if horizon is not None:  # seq_mean_token_sum_norm, which alone has one
        return scale / horizon
    if kind == "seq_mean_token_mean":
        return scale / _at_least_one(segment_total(mask.astype(jnp.int32), segment_ids))
    return scale


def check_aggregation(kind: str, horizon: float | None) -> None:
    """Raise ConfigError unless `token_scale` accepts this kind with this horizon."""
    if kind not in AGGREGATIONS:
        raise ConfigError(f'aggregation "{kind}" is unknown{nearest(kind, AGGREGATIONS)}',
                          "docs/objectives.md lists them")
    if kind != "seq_mean_token_sum_norm":
        if horizon is not None:
            raise ConfigError(
                f'horizon = {horizon} means nothing to the aggregation "{kind}"',
                'leave it out, or choose "seq_mean_token_sum_norm"',
            )
    elif horizon is None or not (math.isfinite(horizon) and horizon > 0):
        raise ConfigError(
            f'the aggregation "{kind}" divides by a horizon of {horizon}',
            "set it to a positive number of tokens that stays the same for the whole run, such as the "
            "longest response",
        )


def _at_least_one(count: Array) -> Array:
    return jnp.maximum(count, 1).astype(jnp.float32)
