"""The guard: updates that are not finite are skipped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfp8rl.optim.adamw import Optimizer
from jaxfp8rl.optim.loss_scale import LARGEST_LOSS_SCALE, LOSS_SCALE_PATIENCE, first_loss_scale
from jaxfp8rl.types import Params, StepMetrics, TrainState


def from_optax(transformation: optax.GradientTransformation) -> Optimizer:
    """An Optimizer of float32 parameters from any optax transformation."""

    def update(grads: Params, scale: Array, state: Any, params: Params, finite: Array) -> tuple:
        norm = scale * optax.tree.norm(grads)

        def apply() -> tuple[optax.Params, optax.OptState]:
            updates, new = transformation.update(jax.tree.map(lambda g: g * scale, grads), state, params)
            return optax.apply_updates(params, updates), new

        return *jax.lax.cond(finite & jnp.isfinite(norm), apply, lambda: (params, state)), norm

    def init(params: Params) -> tuple[Params, Any]:
        params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        return params, transformation.init(params)

    return Optimizer(init, update)


def init_state(
    params: Params, optimizer: Optimizer | optax.GradientTransformation, compute_dtype: str = "float32"
) -> TrainState:
    """A fresh TrainState around parameters, float32 or of a smaller float type, which become its masters. It
    has a loss scale under float16."""
    steps, bad, good = (jnp.zeros((), jnp.int32) for _ in range(3))  # three buffers: each is donated
    masters, opt_state = _ours(optimizer).init(params)
    return TrainState(steps, masters, opt_state, bad, jnp.float32(first_loss_scale(compute_dtype)), good)


def _ours(optimizer: Optimizer | optax.GradientTransformation) -> Optimizer:
    return optimizer if isinstance(optimizer, Optimizer) else from_optax(optimizer)


def guarded_update(
    optimizer: Optimizer | optax.GradientTransformation, state: TrainState, loss: Array, grads: Params,
    live: Array | bool = True
) -> tuple[TrainState, StepMetrics]:
    """Apply `grads`, the gradients times state.loss_scale. If the loss or their global norm is not finite,
    keep every byte of params and optimiser state instead, and increment `bad_steps`. (optax.apply_if_finite
    applies the bad update after N in a row: a delay, not a guard.)

    Every byte is also kept if no token is `live`: Adam's momentum alone must not move the weights. Such an
    update is neither good nor bad, unless it is not finite: both counts in a row stay.

    With a loss scale above 1 a finite loss with gradients that overflowed is not a bad step: the scale is
    halved; it doubles after LOSS_SCALE_PATIENCE good updates in a row (Micikevicius et al. 2018, "Mixed
    Precision Training", section 3.2). At 2 it is halved no more, since 1 means no scale: then gradients that
    overflow are a bad step.
    """
    finite = jnp.isfinite(loss)
    scale = 1 / state.loss_scale  # a power of two
    params, opt_state, norm = _ours(optimizer).update(grads, scale, state.opt_state, state.params,
                                                      finite & live)
    sound = finite & jnp.isfinite(norm)
    ok, scaling = sound & live, state.loss_scale > 1
    overflow = (state.loss_scale > 2) & finite & ~sound
    grow = ok & scaling & (state.good_steps
                           + 1 >= LOSS_SCALE_PATIENCE) & (state.loss_scale < LARGEST_LOSS_SCALE)
    new = state._replace(
        step=state.step + ok,
        params=params,
        opt_state=opt_state,
        bad_steps=jnp.where(ok, 0, state.bad_steps + ~(sound | overflow)),
        loss_scale=state.loss_scale * jnp.where(grow, 2.0, jnp.where(overflow, 0.5, 1.0)),
        good_steps=jnp.where(sound & ~grow, state.good_steps + (ok & scaling), 0),
    )
    return new, {
        "grad_norm": norm, "update/applied": ok.astype(jnp.float32), "update/bad_in_a_row": new.bad_steps,
        "update/overflow": overflow.astype(jnp.float32), "update/loss_scale": new.loss_scale,
    }
