"""AdamW with warm-up and global-norm clipping, and the guard that never applies a non-finite update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfp8rl.config import Optim
from jaxfp8rl.types import Params, StepMetrics, TrainState


FIRST_LOSS_SCALE, LARGEST_LOSS_SCALE, LOSS_SCALE_PATIENCE = 2.0**15, 2.0**16, 200


def make_schedule(cfg: Optim, updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up to `lr`, then constant, cosine or linear decay to 0 at `updates`."""
    after = max(updates - cfg.warmup_steps, 1)
    tail = {
        "constant": lambda: optax.constant_schedule(cfg.lr),
        "cosine": lambda: optax.cosine_decay_schedule(cfg.lr, after),
        "linear": lambda: optax.linear_schedule(cfg.lr, 0.0, after),
    }[cfg.schedule]()
    warmup = optax.linear_schedule(cfg.lr / max(cfg.warmup_steps, 1), cfg.lr, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, tail], [cfg.warmup_steps]) if cfg.warmup_steps else tail


def make_optimizer(cfg: Optim, updates: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW. Weight decay spares vectors (norm weights), stacked [L, D] ones included."""

    def decayed(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in jax.tree_util.keystr(path), params)

    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(make_schedule(cfg, updates), cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay, mask=decayed),
    )


def init_state(params: Params, optimizer: optax.GradientTransformation, compute_dtype: str = "float32") -> TrainState:
    """A fresh TrainState around float32 master parameters; under float16 with a loss scale."""
    steps, bad, good = (jnp.zeros((), jnp.int32) for _ in range(3))  # three buffers: each is donated
    scale = FIRST_LOSS_SCALE if compute_dtype == "float16" else 1.0
    return TrainState(steps, params, optimizer.init(params), bad, jnp.float32(scale), good)


def guarded_update(
    optimizer: optax.GradientTransformation, state: TrainState, loss: Array, grads: Params
) -> tuple[TrainState, StepMetrics]:
    """Apply `grads` unless the loss or their global norm is not finite; then keep every byte of params and optimiser state
    and count up `bad_steps`. (optax.apply_if_finite applies the bad update after N in a row: a delay, not a guard.)

    With a loss scale above 1 a finite loss with gradients that overflowed is no bad step: the scale is halved; it doubles
    after LOSS_SCALE_PATIENCE good updates in a row (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).
    """
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(loss) & jnp.isfinite(norm)
    scaling = state.loss_scale > 1
    overflow = scaling & jnp.isfinite(loss) & ~jnp.isfinite(norm)

    def apply() -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        grow = scaling & (state.good_steps + 1 >= LOSS_SCALE_PATIENCE) & (state.loss_scale < LARGEST_LOSS_SCALE)
        return TrainState(
            state.step + 1, optax.apply_updates(state.params, updates), opt_state, jnp.zeros((), jnp.int32),
            jnp.where(grow, 2 * state.loss_scale, state.loss_scale), jnp.where(grow, 0, state.good_steps + scaling),
        )  # fmt: skip

    def skip() -> TrainState:
        return state._replace(
            bad_steps=state.bad_steps + ~overflow,
            loss_scale=jnp.where(overflow, state.loss_scale / 2, state.loss_scale),
            good_steps=jnp.zeros((), jnp.int32),
        )

    new = jax.lax.cond(ok, apply, skip)
    return new, {
        "grad_norm": norm, "update/applied": ok.astype(jnp.float32), "update/bad_in_a_row": new.bad_steps,
        "update/overflow": overflow.astype(jnp.float32), "update/loss_scale": new.loss_scale,
    }  # fmt: skip
