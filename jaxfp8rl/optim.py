"""AdamW with warm-up and global-norm clipping, and the guard that never applies a non-finite update.

Masters and moments are kept in the formats that `optim` names (jaxfp8rl.low_bit). They are read, updated and written where they
lie, a layer of one parameter at a time, so that besides them and the gradients an update needs no more than a few float32 copies
of the largest such layer (docs/optimizer.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfp8rl.config import Optim
from jaxfp8rl.low_bit import Format, Kept, decode, encode, random_words, zeros
from jaxfp8rl.types import Params, StepMetrics, TrainState

FIRST_LOSS_SCALE, LARGEST_LOSS_SCALE, LOSS_SCALE_PATIENCE = 2.0**15, 2.0**16, 200

# How masters and moments are rounded that are too faint for the digits of their format: moments so that a step gets smaller,
# for a first moment rounded up, or a second one rounded to 0, makes a step of a thousand learning rates.
FAINT = ("stochastic", "down", "up")


class Optimizer(NamedTuple):
    """An optax.GradientTransformation whose update gives the new parameters themselves, because only it can round them.

    init(params float32) -> (parameters as they are kept, state)
    update(grads float32, state, params, ok) -> (params, state); the very bytes that it got unless `ok`, a traced bool.
    """

    init: Callable[[Params], tuple[Params, Any]]
    update: Callable[[Params, Any, Params, Array], tuple[Params, Any]]


class Formats(NamedTuple):
    """What is kept how between updates, and whether the moments are kept in pinned host memory."""

    master: Format = "float32"
    first: Format = "float32"
    second: Format = "float32"
    offload: bool = False


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


def make_optimizer(cfg: Optim, updates: int) -> Optimizer:
    """Clip by global norm, then AdamW. Weight decay spares vectors (norm weights), stacked [L, D] ones included."""
    return adamw(cfg, make_schedule(cfg, updates), Formats(cfg.master, cfg.first_moment, cfg.second_moment, cfg.offload))


def adamw(cfg: Optim, schedule: optax.Schedule, formats: Formats) -> Optimizer:
    """optax.adamw after optax.clip_by_global_norm, in float32 between reading and rounding. The state is an
    optax.ScaleByAdamState, its moments in their formats; the bits that round are drawn by (count, leaf, layer).
    """
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)

    def init(params: Params) -> tuple[Params, optax.ScaleByAdamState]:
        moment = lambda kept_as: jax.tree.map(lambda p: zeros(p.shape, kept_as), params)
        masters = jax.tree.map(lambda p: _nearest(p, formats.master), params)
        kept = _stow((masters, moment(formats.first), moment(formats.second)), formats.offload)
        return kept[0], optax.ScaleByAdamState(jnp.int32(0), *kept[1:])

    def update(grads: Params, state: optax.ScaleByAdamState, params: Params, ok: Array) -> tuple[Params, Any]:
        norm, rate, count = optax.tree.norm(grads), schedule(state.count), state.count

        def leaf(number: int, path: tuple, grads: Array, *kept: Kept) -> tuple[Kept, ...]:
            decay = 0.0 if "norm" in jax.tree_util.keystr(path) else cfg.weight_decay

            def step(i: Array, g: Array, kept: tuple[Kept, ...]) -> tuple[Kept, ...]:
                param, mu, nu = map(decode, kept)
                g = jnp.where(norm < cfg.clip_norm, g, g / norm * cfg.clip_norm)
                direction, new = adam.update(g, optax.ScaleByAdamState(count, mu, nu))
                param -= rate * (direction + decay * param)
                words = random_words(salts[number], i, g.shape)
                after = tuple(map(encode, (param, new.mu, new.nu), formats[:3], words, FAINT))
                return jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, kept)

            in_place = _by_layer if path[0].key == "layers" else _at_once
            return in_place(step, grads, kept, formats.offload)

        paths, tree = jax.tree_util.tree_flatten_with_path(grads)
        salts = jax.random.bits(jax.random.fold_in(jax.random.key(0), count), (len(paths), 2), jnp.uint32)
        kept = (tree.flatten_up_to(t) for t in (params, state.mu, state.nu))
        leaves = [leaf(n, path, g, *x) for n, ((path, g), *x) in enumerate(zip(paths, *kept))]
        params, mu, nu = map(tree.unflatten, zip(*leaves))
        return params, optax.ScaleByAdamState(count + ok, mu, nu)

    return Optimizer(init, update)


_nearest = jax.jit(encode, static_argnums=1)  # jitted, so that nothing of a stack's size stands beside it


def _by_layer(step: Callable, grads: Array, kept: tuple[Kept, ...], offload: bool) -> tuple[Kept, ...]:
    """`step(i, grads, kept)` of each layer of a stack [L, ...], in place. The barrier reads a layer before any of it is written:
    otherwise XLA copies the whole stack first. (It does so around a `lax.cond`, too, so the guard is a `where`.)"""

    def layer(i: Array, kept: tuple[Kept, ...]) -> tuple[Kept, ...]:
        row = lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        read = jax.lax.optimization_barrier((row(grads), _fetch(jax.tree.map(row, kept), offload)))
        write = lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0)
        return jax.tree.map(write, kept, _stow(step(i, *read), offload))

    return jax.lax.fori_loop(0, len(grads), layer, kept)


def _at_once(step: Callable, grads: Array, kept: tuple[Kept, ...], offload: bool) -> tuple[Kept, ...]:
    return _stow(step(0, *jax.lax.optimization_barrier((grads, _fetch(kept, offload)))), offload)


def _fetch(kept: tuple, offload: bool) -> tuple:
    """(masters, moments...), the moments from pinned host memory."""
    return (kept[0], *jax.device_put(kept[1:], jax.memory.Space.Device)) if offload else kept


def _stow(kept: tuple, offload: bool) -> tuple:
    return (kept[0], *jax.device_put(kept[1:], jax.memory.Space.Host)) if offload else kept


def from_optax(transformation: optax.GradientTransformation) -> Optimizer:
    """Any optax transformation, of float32 parameters."""

    def update(grads: Params, state: Any, params: Params, ok: Array) -> tuple[Params, Any]:
        def apply() -> tuple[Params, Any]:
            updates, new = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), new

        return jax.lax.cond(ok, apply, lambda: (params, state))

    return Optimizer(lambda params: (params, transformation.init(params)), update)


def init_state(
    params: Params, optimizer: Optimizer | optax.GradientTransformation, compute_dtype: str = "float32"
) -> TrainState:
    """A fresh TrainState around float32 parameters, which become its masters; under float16 with a loss scale."""
    steps, bad, good = (jnp.zeros((), jnp.int32) for _ in range(3))  # three buffers: each is donated
    scale = FIRST_LOSS_SCALE if compute_dtype == "float16" else 1.0
    masters, opt_state = _ours(optimizer).init(params)
    return TrainState(steps, masters, opt_state, bad, jnp.float32(scale), good)


def _ours(optimizer: Optimizer | optax.GradientTransformation) -> Optimizer:
    return optimizer if isinstance(optimizer, Optimizer) else from_optax(optimizer)


def guarded_update(
    optimizer: Optimizer | optax.GradientTransformation, state: TrainState, loss: Array, grads: Params
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
    grow = ok & scaling & (state.good_steps + 1 >= LOSS_SCALE_PATIENCE) & (state.loss_scale < LARGEST_LOSS_SCALE)
    params, opt_state = _ours(optimizer).update(grads, state.opt_state, state.params, ok)
    new = TrainState(
        step=state.step + ok,
        params=params,
        opt_state=opt_state,
        bad_steps=jnp.where(ok, 0, state.bad_steps + ~overflow),
        loss_scale=state.loss_scale * jnp.where(grow, 2.0, jnp.where(overflow, 0.5, 1.0)),
        good_steps=jnp.where(ok & ~grow, state.good_steps + scaling, 0),
    )
    return new, {
        "grad_norm": norm, "update/applied": ok.astype(jnp.float32), "update/bad_in_a_row": new.bad_steps,
        "update/overflow": overflow.astype(jnp.float32), "update/loss_scale": new.loss_scale,
    }  # fmt: skip
