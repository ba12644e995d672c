"""One update in one jit: log-probabilities -> correction -> objective -> gradients -> finite guard -> update.

    mu (engine)  --rho = pi_old / mu, corrected once a batch-->  pi_old  --r = pi / pi_old, clipped-->  pi

pi is the learner now. Without a scoring pass, each micro-batch computes its correction from pi. pi_old is
then pi itself, with r = 1 (loss.old_policy = "current", for one update a step), or mu, with r = pi / mu
(loss.old_policy = "rollout"), or lies between them ("loglinear": jaxfp8rl.losses.proximal).

The micro-batches are a `lax.scan`. Every denominator is counted over the whole batch before the scan, so no
result depends on how the batch was split, padded or packed. An FP8 backward pass is the exception: the blocks
of its wgrad run along the tokens of a micro-batch. Nothing here leaves the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.distributed.mesh import ALL, ONE, ROWS, TENSOR, MeshLayout
from jaxfp8rl.losses.aggregation import token_scale
from jaxfp8rl.losses.correction import Correction, CorrectionConfig, rollout_correction
from jaxfp8rl.losses.covariance import select_tokens
from jaxfp8rl.losses.kl import kl_penalty
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.losses.mismatch import advantage_skew, mean_over
from jaxfp8rl.losses.objectives import SELECTING, off_policy, policy_loss
from jaxfp8rl.losses.proximal import proximal_logp
from jaxfp8rl.microbatch import accumulate, map_live
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import Remat, forward_with_aux, head_weight
from jaxfp8rl.optim.adamw import Optimizer
from jaxfp8rl.optim.guard import guarded_update
from jaxfp8rl.policy.policy import (
    adapters_in,
    combine,
    gradients_like,
    outer,
    over_base,
    partition,
    policy_of,
    scales_in,
)
from jaxfp8rl.precision.jit import gradient_jit, rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.training.draft import DraftTraining
from jaxfp8rl.types import Params, TrainBatch, TrainState

DONATED = 0, 1  # of an update's arguments: the state, and the policy outside an engine's memory


def make_policy(precision: Precision, codes: bool = True, layout: MeshLayout = ONE) -> jax.stages.Wrapped:
    """Jitted policy(params) -> the policy that computes and is published (jaxfp8rl.policy.policy)."""
    return rounding_exact_jit(functools.partial(layout.on_weights,
                                       functools.partial(policy_of, precision=precision, codes=codes)))


def make_logprobs(model: ModelConfig, precision: Precision, temperature: float, remat: Remat,
                  layout: MeshLayout = ONE, with_hidden: bool = False) -> Callable:
    """f(policy, batch of [R, T] fields) -> (logp, entropy, the routing of expert layers or None), and the
    hidden states [R, T, D] `with_hidden`.

    logp and entropy are [R, T] float32, in nats, over batch.support, and 0 where the response mask is false.
    On several devices, f runs on each device with its part of the policy and of the batch.
    """

    def logprobs(policy: Params, batch: TrainBatch) -> tuple:
        fields = batch.tokens, batch.positions, batch.segment_ids
        hidden, _, routing = forward_with_aux(policy, model, *fields, precision, remat, layout, batch.routes,
                                              batch.ends)
        head = layout.gather(head_weight(policy, model))
        return *token_logprobs(
            hidden, head, batch.tokens, temperature, logits_dtype=precision.rounding.logits_dtype,
            mask=batch.response_mask,
            axis_name=TENSOR if layout.tensor > 1 else None, support=batch.support,
            softcap=model.final_logit_softcapping, exact=bool(precision.exact),
        ), routing, *([hidden] if with_hidden else [])

    return logprobs


def make_score(logprobs: Callable, layout: MeshLayout = ONE) -> jax.stages.Wrapped:
    """Jitted score(policy, batch) -> old_logp [M, R, T] float32: the learner's log-probabilities of the
    sampled tokens."""

    def of_rows(policy: Params, batch: TrainBatch, live: Array) -> Array:
        return map_live(lambda micro: logprobs(policy, micro)[0], batch, live)

    @rounding_exact_jit
    def score(policy: Params, batch: TrainBatch) -> Array:
        run = layout.run(of_rows, (layout.specs(policy), ROWS, ALL), ROWS)
        return run(policy, batch, batch.response_mask.any((1, 2)))

    return score


class TrainStep(NamedTuple):
    """One update, from scored rows to the new state; `make_train_step` jits `update`. The methods are ordered
    from the innermost to the outermost.

    The step asks two things of a tree of weights: `policy_of(masters, codes)` gives the policy that computes,
    and `gradients_like(policy)` zeros for the sums of its gradients, which are those of the masters.
    """

    logprobs: Callable
    policy_of: Callable[[Params, bool], Params]
    gradients_like: Callable[[Params], Params]
    loss: Loss
    correction: CorrectionConfig
    optimizer: Optimizer | optax.GradientTransformation
    layout: MeshLayout = ONE
    balance_coef: float = 0.0
    draft: DraftTraining | None = None

    @property
    def is_scored(self) -> bool:
        """Whether a scoring pass has computed pi_old before the update."""
        return self.loss.old_policy == "recomputed"

    def correct(self, logp: Float[Array, "*M R T"], batch: TrainBatch,
                mask: Bool[Array, "*M R T"]) -> Correction:
        """The rollout correction of `logp` against the engine's log-probabilities."""
        return rollout_correction(logp, batch.rollout_logp, mask, self.correction, batch.segment_ids)

    def unscored(self, logp: Float[Array, "*M R T"], batch: TrainBatch) -> Array:
        """The policy that the correction compares with mu, without a scoring pass: pi, or under "loglinear"
        the proximal policy. A constant to the gradient."""
        logp = jax.lax.stop_gradient(logp)
        if self.loss.old_policy != "loglinear":
            return logp
        if batch.ages is None:
            raise ValueError('loss.old_policy = "loglinear" needs TrainBatch.ages: pack(..., ages=True)')
        return proximal_logp(logp, batch.rollout_logp, batch.ages, batch.response_mask)

    def microbatch_loss(self, weights: Params, sums: Params, micro: tuple, policy: Params,
                        clip: tuple | None) -> tuple[Array, dict]:
        """The loss of one micro-batch, divided by the whole batch's denominators, and its [R, T] arrays."""
        loss = self.loss
        batch, old_logp, ref_logp, importance, mask, scale, selected, share, centre = micro
        logp, entropy, routing, *hidden = self.logprobs(policy | weights | {"sums": sums}, batch)
        if not self.is_scored:
            unscored = self.unscored(logp, batch)
            importance = self.correct(unscored, batch, mask).weights
            old_logp = old_logp if loss.old_policy == "rollout" else unscored
        kept_mask = mask & (importance != 0)  # means over a sequence leave out rejected tokens
        fields = logp, old_logp, batch.advantages, kept_mask, batch.segment_ids
        surrogate, aux = policy_loss(*fields, loss.objective_config, clip, selected)
        sampled = batch.rollout_logp if loss.sampled_by == "rollout" else old_logp
        if loss.opsm_delta is not None:
            sequences = batch.advantages, batch.response_mask, batch.segment_ids  # rejected tokens included
            aux["opsm/fraction"] = off_policy(logp, sampled, *sequences, loss.opsm_delta) & mask
            surrogate = jnp.where(aux["opsm/fraction"], 0.0, surrogate)
        total = importance * surrogate
        if loss.kl_coef:
            unbiased: Any = {"sampled_logp": sampled, "weight_cap": loss.kl_weight_cap}
            unbiased = unbiased if loss.unbiased_kl else {}
            kl = kl_penalty(logp, ref_logp, mask, loss.kl, **unbiased, baseline=centre)
            total += loss.kl_coef * kl
            aux["kl"] = jax.lax.stop_gradient(kl)
        if loss.entropy_coef:
            total -= loss.entropy_coef * jnp.where(mask, entropy, 0.0)
        value = jnp.sum(jnp.where(mask, scale * total, 0.0))
        if self.balance_coef:  # weighted by the micro-batch's share of the tokens under any aggregation
            value += self.balance_coef * jnp.mean(routing.balance) * jnp.sum(share)
        return value, {"logp": logp, "entropy": entropy, **({"hidden": hidden[0]} if self.draft else {}),
                       **aux}

    def of_rows(self, policy: Params, batch: tuple, live: Array, loss_scale: Array,
                clip: tuple | None, head: tuple | None) -> tuple:
        """Loss and gradients over all rows, summed over the devices, each of which computes its own rows.
        head: the draft head's weights, and the number of tokens that it guesses."""
        of_micro = functools.partial(self.microbatch_loss, policy=policy, clip=clip)
        sums, beside = self.gradients_like(policy), None
        if self.draft and head:
            sums |= {"draft": jax.tree.map(jnp.zeros_like, head[0])}
            beside = functools.partial(self.draft.beside, *head, policy)
        value, aux, grads = accumulate(of_micro, outer(policy), sums, batch, live, loss_scale, beside)
        return self.layout.sum(value), aux, self.layout.sum_gradients(grads)

    def select(self, batch: TrainBatch, known_logp: Float[Array, "M R T"],
               kept_mask: Bool[Array, "M R T"]) -> Bool[Array, "M R T"] | None:
        """The tokens that a covariance objective treats apart, selected from the whole batch."""
        if self.loss.objective not in SELECTING:
            return None
        kept_mask = kept_mask if self.is_scored else batch.response_mask  # the weights are not known yet
        places = batch.tokens + 262147 * batch.positions  # any number that tells tokens apart
        return select_tokens(known_logp, batch.advantages, kept_mask, places, self.loss.objective_config)

    def has_gradient(self, correction: Correction, advantages: Float[Array, "M R T"],
                     masked: Bool[Array, "M R T"]) -> Bool[Array, "M R T"]:
        """The tokens that can have a gradient. If there are none, the gradient is exactly 0 and only Adam's
        momentum would move the weights."""
        if self.loss.kl_coef or self.loss.entropy_coef or self.balance_coef:
            return correction.mask  # these terms depend on neither weight nor advantage
        penalised = self.loss.objective in ("prime_rl", "kl_cov")  # penalties that have no advantage, either
        # both comparisons are true for NaN, so that the guard sees it
        weighed = (correction.weights != 0) & (penalised | (advantages != 0))
        return correction.mask & weighed & jnp.logical_not(masked)

    def differentiate(self, policy: Params, batch: TrainBatch, known_logp: Array, ref_logp: Array | None,
                      correction: Correction, mask: Array, loss_scale: Array, clip: tuple | None,
                      head: tuple | None = None) -> tuple:
        """(loss, arrays by token [M, R, T], gradients of the policy, and those of a draft head)."""
        loss, segments = self.loss, batch.segment_ids
        scale = token_scale(mask, segments, loss.aggregation, loss.horizon, batch.loss_weights)
        selected = self.select(batch, known_logp, mask & (correction.weights != 0))
        share = token_scale(mask, segments, "token_mean") if self.balance_coef else None
        centre = None
        if loss.kl_baseline and ref_logp is not None:
            centre = jnp.full_like(ref_logp, mean_over(mask, known_logp - ref_logp))
        rows = batch, known_logp, ref_logp, correction.weights, mask, scale, selected, share, centre
        grads_specs = self.layout.specs(jax.eval_shape(self.gradients_like, policy))
        run = self.layout.run(self.of_rows, (self.layout.specs(policy), ROWS, ALL, ALL, ALL, ALL),
                              (ALL, ROWS, grads_specs))
        return run(policy, rows, mask.any((1, 2)), loss_scale, clip, head)

    def update(self, state: TrainState, learner_weights: Params, engine_weights: Params, batch: TrainBatch,
               old_logp: Float[Array, "M R T"], ref_logp: Float[Array, "M R T"] | None = None,
               clip: tuple[Float[Array, ""], Float[Array, ""]] | None = None) -> tuple:
        """(new state, the part of its policy that has changed, metrics). The policy comes in two trees, as
        `partition` returns it."""
        policy, in_engine = combine(learner_weights, engine_weights), bool(jax.tree.leaves(engine_weights))
        sampled = batch.response_mask
        if batch.loss_weights is not None:
            sampled &= batch.loss_weights != 0
        correction = self.correct(old_logp, batch, sampled)
        mask = correction.mask if self.is_scored else sampled
        known_logp = old_logp if self.is_scored else batch.rollout_logp  # pi_old, before any split
        draft, learning, of_draft = state.draft, None, {}
        if self.draft and draft:
            learning = draft.params, jnp.sum(self.draft.targets(batch, 1), dtype=jnp.float32)
        value, aux, grads = self.differentiate(policy, batch, known_logp, ref_logp, correction, mask,
                                               state.loss_scale, clip, learning)
        if self.draft and draft and learning:
            draft, of_draft = self.draft.update(draft, grads.pop("draft"), aux.pop("guess"), learning[1])
        logp = aux.pop("logp")
        if not self.is_scored:
            old_logp = self.unscored(logp, batch)
            correction = self.correct(old_logp, batch, sampled)
        silent = aux.get("opsm/fraction", False) | aux.get("clip/covariance", jnp.zeros_like(sampled))
        live = jnp.any(self.has_gradient(correction, batch.advantages, silent))
        state, applied = guarded_update(self.optimizer, state._replace(draft=None), value, grads, live)
        before = batch.rollout_logp if self.loss.old_policy == "rollout" else old_logp
        metrics = {"loss": value, "tokens/update": jnp.sum(correction.mask & live),
                   "staleness/k1": mean_over(mask, before - logp)}
        metrics |= {name: mean_over(mask, x)
                    for name, x in aux.items()} | correction.metrics | applied | of_draft
        metrics |= advantage_skew(old_logp, batch.rollout_logp, batch.advantages, sampled)
        state = self.layout.keep(state)._replace(draft=draft)
        quantized = lambda params: self.policy_of(params, not in_engine)
        return state, self.layout.on_weights(quantized, state.params) | scales_in(policy), metrics


def make_train_step(
    logprobs: Callable, precision: Precision, loss: Loss, correction: CorrectionConfig, optimizer: Optimizer,
    layout: MeshLayout = ONE, balance_coef: float = 0.0, gradient_sums: str = "float32",
    draft: DraftTraining | None = None,
) -> Callable:
    """Jitted train_step(state, policy, batch, old_logp, ref_logp=None, clip=None) -> (state, policy,
    metrics).

    The buffers of state and policy are donated, except weights in an engine's memory. The returned policy
    belongs to the new state; it has no codes if the engine holds them.

    old_logp, ref_logp: [M, R, T] float32, the log-probabilities of the learner at the weights that sampled
    and, under loss.kl_coef, of the reference. clip: two scalars that replace the objective's clip distances.

    gradient_sums: the type in which the gradients of micro-batches are summed (optim.gradient_sums). draft:
    how the draft head of state.draft learns from the same hidden states, which `logprobs` then returns, too.

    An update in which no token can have a gradient is not applied and counts no token: all weights or
    advantages are 0, and every term of the loss depends on them.
    """
    quantized = lambda params, codes: policy_of(params, precision, codes)
    sums_like = functools.partial(gradients_like, dtype=gradient_sums)
    step = TrainStep(logprobs, quantized, sums_like, loss, correction, optimizer, layout, balance_coef, draft)
    return on_policy(gradient_jit(step.update, donate_argnums=DONATED))


def on_policy(update: Callable) -> Callable:
    """`update`, which takes the policy in two trees, as a function of one. `__wrapped__` is `update`."""

    @functools.wraps(update, updated=())
    def train_step(state: TrainState, policy: Params, *rest: Any, **more: Any):
        own, other = partition(policy)
        state, policy, metrics = update(state, own, other, *rest, **more)
        return state, over_base(policy, other) if adapters_in(own) else policy, metrics

    return train_step
