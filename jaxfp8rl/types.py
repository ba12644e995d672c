"""The records that the learner's jitted functions exchange.

Shape letters, everywhere in this package: B sequences or packed rows, T tokens, D model width, F hidden
width, H query heads, K key-value heads, d head size, V vocabulary, L layers, M micro-batches, R rows of a
micro-batch, N and K outputs and inputs of a linear. `rollout_logp` is mu (the engine), `old_logp` is pi_old
(the learner at the weights that sampled), `logp` is pi (the learner now).
"""

from __future__ import annotations

from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int, UInt

Params = dict  # nested dict of arrays that mirrors HF names: see models/transformer.py
StepMetrics = dict[str, Array]  # flat metric name -> scalar


class TrainBatch(NamedTuple):
    """One update's packed rows, as M micro-batches of R rows of T tokens; one micro-batch of it has no M. Every
    field is aligned with `tokens`: position t of `logp`-like fields speaks of token t given the tokens before it in its segment.

    tokens: token ids, 0 where padded. positions: 0, 1, ... within each segment. segment_ids: 1, 2, ... within
    a row; 0 is padding. response_mask: True on the tokens that were sampled, which alone are learned from.
    rollout_logp: the engine's log-probabilities; 0 elsewhere. advantages: of the token's completion; 0
    elsewhere. routes: of models with S sparse layers the experts that are to compute, k a token, instead of
    their routers' choice; the
        largest number of the type leaves it to the router (jaxfp8rl.models.moe). None: all is left to it.
    loss_weights: factors of the tokens' losses; a token of weight 0 leaves loss and denominators (prime-rl).
    None: all are 1. support: the tokens that each was drawn among, -1 for none (jaxfp8rl.rollout.support).
    None: among the whole vocabulary.
    """

    tokens: Int[Array, "*M R T"]
    positions: Int[Array, "*M R T"]
    segment_ids: Int[Array, "*M R T"]
    response_mask: Bool[Array, "*M R T"]
    rollout_logp: Float[Array, "*M R T"]
    advantages: Float[Array, "*M R T"]
    routes: UInt[Array, "*M R T S k"] | None = None
    loss_weights: Float[Array, "*M R T"] | None = None
    support: Int[Array, "*M R T K"] | None = None


class TrainState(NamedTuple):
    """All that an update changes. `params` are the masters, as `optim.master` keeps them
    (jaxfp8rl.optim.low_bit); the policy is their rounding (jaxfp8rl.policy.policy)."""

    step: Int[Array, ""]  # updates applied
    params: Params
    opt_state: tuple
    bad_steps: Int[Array, ""]  # non-finite updates in a row, none of them applied
    loss_scale: Float[Array, ""]  # 1 unless the backward pass is in float16
    good_steps: Int[Array, ""]  # updates applied since the loss scale last changed; 0 without one
