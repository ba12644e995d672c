"""AdamW with warm-up and global-norm clipping, and the guard that never applies a non-finite update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfp8rl.config import Optim
from jaxfp8rl.types import Params, StepMetrics, TrainState


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


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh TrainState around float32 master parameters."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jnp.zeros((), jnp.int32))


def guarded_update(
    optimizer: optax.GradientTransformation, state: TrainState, loss: Array, grads: Params
) -> tuple[TrainState, StepMetrics]:
    """Apply `grads` unless the loss or their global norm is not finite; then keep every byte of params and optimiser state
    and count up `bad_steps`. (optax.apply_if_finite applies the bad update after N in a row: a delay, not a guard.)
    """
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(loss) & jnp.isfinite(norm)

    def apply() -> TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state, jnp.zeros((), jnp.int32))

    new = jax.lax.cond(ok, apply, lambda: state._replace(bad_steps=state.bad_steps + 1))
    return new, {"grad_norm": norm, "update/applied": ok.astype(jnp.float32), "update/bad_in_a_row": new.bad_steps}
