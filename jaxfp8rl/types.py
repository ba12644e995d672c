"""The records that the learner's jitted functions exchange.

Shape letters, used throughout this package: B sequences or packed rows, T tokens, D model width, F hidden
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
    """The packed rows of one update, as M micro-batches of R rows of T tokens; a single micro-batch has no M.
    Every field is aligned with `tokens`: position t of a log-probability belongs to token t, given the tokens
    before it in its segment.

    - tokens: token ids, 0 for padding.
    - positions: 0, 1, ... within each segment; from the length of the shared prefix on, where there is one.
    - segment_ids: 1, 2, ... within a row; 0 for padding.
    - response_mask: True on the sampled tokens; only these are learned from.
    - rollout_logp: the engine's log-probabilities; 0 elsewhere.
    - advantages: that of the token's completion; 0 elsewhere.
    - routes: for models with S sparse layers, the k experts of each token, in place of the routers' choice.
      The largest number of the dtype leaves a choice to the router (jaxfp8rl.models.moe). None: the routers
      choose everything.
    - loss_weights: factors of the tokens' losses. A token of weight 0 is excluded from loss and denominators
      (prime-rl). None: all are 1.
    - support: the candidate tokens that each token was drawn from, padded with -1 (jaxfp8rl.rollout.support).
      None: the whole vocabulary.
    - ends: of each token, the place in its row behind the last token that sees it; 0 for padding. A token
      sees those before it whose end lies behind it: the prefix that its sequence shares with others of the
      row (jaxfp8rl.data.trees), and its own sequence. None: it sees its own segment.
    - ages: by how many versions the weights before the step are newer than those that sampled the token; 0
      elsewhere. None: the update does not need them (loss.old_policy = "loglinear" does).
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
    ages: Float[Array, "*M R T"] | None = None
    ends: Int[Array, "*M R T"] | None = None


class TrainState(NamedTuple):
    """The state that an update changes. `params` are the masters in the format `optim.master`
    (jaxfp8rl.optim.low_bit); the policy is their rounding (jaxfp8rl.policy.policy). `draft`: the state of the
    draft head that learns beside it (jaxfp8rl.training.draft), or None."""

    step: Int[Array, ""]  # updates applied
    params: Params
    opt_state: tuple
    bad_steps: Int[Array, ""]  # consecutive non-finite updates, none of them applied
    loss_scale: Float[Array, ""]  # 1 unless the backward pass is in float16
    good_steps: Int[Array, ""]  # updates applied since the loss scale last changed; 0 without a loss scale
    draft: TrainState | None = None
