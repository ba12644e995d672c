"""The page: log-probabilities -> correction -> objective -> gradients -> finite guard -> update, in one jit.

    mu (engine)  --rho = pi_old / mu, corrected once a batch-->  pi_old  --r = pi / pi_old, clipped-->  pi (now)

Micro-batches are a `lax.scan`; every denominator is counted over the whole batch before it, so no result depends on how
the batch was split, padded or packed. (An FP8 backward is the exception: the blocks of its wgrad run along the tokens of a
micro-batch.) Nothing here leaves the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfp8rl.config import Loss
from jaxfp8rl.exact import exact_jit
from jaxfp8rl.losses.correction import CorrectionConfig, rollout_correction
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.losses.objectives import clipped_objective
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.optim import guarded_update
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.precision.recipe import Precision
from jaxfp8rl.types import Params, StepMetrics, TrainBatch, TrainState


def policy_weights(params: Params, precision: Precision) -> Params:
    """The policy as it is published: masters rounded to `weight_dtype`, held in `compute_dtype`."""
    return jax.tree.map(lambda p: round_to(p, precision.weight_dtype).astype(precision.compute_dtype), params)


def make_logprobs(model: ModelConfig, precision: Precision, temperature: float, remat: bool) -> Callable:
    """f(policy weights, batch of [R, T] fields) -> (logp, entropy), each [R, T] float32."""

    def logprobs(weights: Params, batch: TrainBatch) -> tuple[Array, Array]:
        hidden = forward(weights, model, batch.tokens, batch.positions, batch.segment_ids, precision, remat)
        return token_logprobs(hidden, head_weight(weights, model), batch.tokens, temperature)

    return logprobs


def make_score(logprobs: Callable, precision: Precision) -> Callable:
    """Jitted score(params, batch) -> old_logp [M, R, T]: the learner's log-probabilities of what the engine sampled."""

    @exact_jit
    def score(params: Params, batch: TrainBatch) -> Array:
        weights = policy_weights(params, precision)
        return jax.lax.map(
            lambda micro: jax.lax.cond(
                micro.response_mask.any(), lambda: logprobs(weights, micro)[0], lambda: jnp.zeros(micro.tokens.shape)
            ),
            batch,
        )

    return score


def make_train_step(logprobs: Callable, precision: Precision, loss: Loss, optimizer: optax.GradientTransformation) -> Callable:
    """Jitted train_step(state, batch, old_logp) -> (state, metrics); the state's buffers are donated."""
    correction = CorrectionConfig("token" if loss.correction == "token_tis" else "none", loss.tis_cap)

    def microbatch_loss(weights: Params, micro: tuple, tokens: Array) -> tuple[Array, StepMetrics]:
        batch, old_logp, importance, mask = micro
        logp, entropy = logprobs(weights, batch)
        logp = jnp.where(mask, logp, 0.0)  # inner where: what is under the mask must not reach the gradient
        surrogate, clipped = clipped_objective(
            logp, jnp.where(mask, old_logp, 0.0), batch.advantages, loss.clip_low, loss.clip_high
        )
        sums = {"entropy": entropy, "clip/fraction": clipped, "staleness/k1": old_logp - logp}
        sums = {k: jnp.sum(jnp.where(mask, v, 0.0)) / tokens for k, v in sums.items()}
        return jnp.sum(jnp.where(mask, importance * surrogate, 0.0)) / tokens, sums

    @functools.partial(exact_jit, donate_argnums=0)
    def train_step(state: TrainState, batch: TrainBatch, old_logp: Array) -> tuple[TrainState, StepMetrics]:
        fix = rollout_correction(old_logp, batch.rollout_logp, batch.response_mask, correction)
        tokens = jnp.maximum(jnp.sum(fix.mask), 1).astype(jnp.float32)
        value, sums, grads = accumulate(
            functools.partial(microbatch_loss, tokens=tokens), policy_weights(state.params, precision),
            (batch, old_logp, fix.weights, fix.mask), fix.mask,
        )  # fmt: skip
        state, update = guarded_update(optimizer, state, value, grads)
        return state, {"loss": value, "tokens/update": jnp.sum(fix.mask), **sums, **fix.metrics, **update}

    return train_step


def accumulate(loss_fn: Callable, weights: Params, batch: tuple, mask: Array) -> tuple[Array, StepMetrics, Params]:
    """Sum (loss, metrics, gradients in float32) of `loss_fn(weights, micro)` over the leading axis of `batch`.

    Micro-batches whose `mask` [M, R, T] is empty are skipped, not computed and thrown away.
    """
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)

    def run(micro: tuple) -> tuple:
        (value, sums), grads = grad_fn(weights, micro)
        return value, sums, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run, jax.tree.map(lambda x: x[0], batch)))

    def body(total: tuple, step: tuple) -> tuple:
        micro, live = step
        return jax.lax.cond(live, lambda: jax.tree.map(jnp.add, total, run(micro)), lambda: total), None

    return jax.lax.scan(body, zeros, (batch, mask.any((1, 2))))[0]
