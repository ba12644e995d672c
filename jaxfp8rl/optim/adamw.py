"""AdamW with warm-up and global-norm clipping, and the guard that never applies a non-finite update.

Masters and moments are kept in the formats that `optim` names (jaxfp8rl.optim.low_bit). They are read,
updated and written where they lie, in one elementwise pass after one look ahead: besides them and the
gradients an update needs next to nothing (docs/optimizer.md). What is kept in host memory comes and goes a
layer of one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxfp8rl.config.schema import Optim
from jaxfp8rl.optim.low_bit import (
    Format,
    Stored,
    block_amax,
    blocks,
    decode,
    encode,
    is_scaled,
    random_bits,
    zeros,
)
from jaxfp8rl.types import Params, StepMetrics, TrainState

FIRST_LOSS_SCALE, LARGEST_LOSS_SCALE, LOSS_SCALE_PATIENCE = 2.0**15, 2.0**16, 200

# How masters and moments are rounded that are too faint for the digits of their format: moments so that a
# step gets smaller, for a first moment rounded up, or a second one rounded to 0, makes a step of a thousand
# learning rates.
FAINT = ("stochastic", "down", "up")
MARGIN = 1 + 2.0**-20  # of a bound on numbers that are computed again, and may then round another way


class Optimizer(NamedTuple):
    """An optax.GradientTransformation whose update gives the new parameters themselves, because only it can
    round them.

    init(params float32) -> (parameters as they are kept, state) update(grads float32, scale, state, params,
    finite) -> (params, state, global norm), the gradients being grads * scale: the very bytes that it got
    unless `finite`, a traced bool, and the norm is finite.
    """

    init: Callable[[Params], tuple[Params, Any]]
    update: Callable[[Params, Array, Any, Params, Array], tuple[Params, Any, Array]]


class Formats(NamedTuple):
    """What is kept how between updates, and whether the moments are kept in pinned host memory."""

    master: Format = "float32"
    first: Format = "float32"
    second: Format = "float32"
    offload: bool = False


def make_schedule(cfg: Optim, updates: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up to `lr`, then constant, or a cosine or linear decay to lr *
    min_lr_ratio at update `total_steps`, or else `updates`; there it stays."""
    after = max((cfg.total_steps or updates) - cfg.warmup_steps, 1)
    tail = {
        "constant": lambda: optax.constant_schedule(cfg.lr),
        "cosine": lambda: optax.cosine_decay_schedule(cfg.lr, after, cfg.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(cfg.lr, cfg.lr * cfg.min_lr_ratio, after),
    }[cfg.schedule]()
    warmup = optax.linear_schedule(cfg.lr / max(cfg.warmup_steps, 1), cfg.lr, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, tail], [cfg.warmup_steps]) if cfg.warmup_steps else tail


def make_optimizer(cfg: Optim, updates: int) -> Optimizer:
    """Clip by global norm, then AdamW. Weight decay spares vectors (norm weights), stacked [L, D] ones
    included."""
    return adamw(cfg, make_schedule(cfg, updates),
                 Formats(cfg.master, cfg.first_moment, cfg.second_moment, cfg.offload))


def adamw(cfg: Optim, schedule: optax.Schedule, formats: Formats) -> Optimizer:
    """optax.adamw after optax.clip_by_global_norm, in float32 between reading and rounding. The state is an
    optax.ScaleByAdamState, its moments in their formats; the bits that round are drawn by (count, leaf,
    place).
    """

    def init(params: Params) -> tuple[Params, optax.ScaleByAdamState]:
        moment = lambda kept_as: jax.tree.map(lambda p: zeros(p.shape, kept_as), params)
        masters = jax.tree.map(lambda p: _nearest(p, formats.master), params)
        kept = masters, moment(formats.first), moment(formats.second)
        masters, *moments = _stow(kept) if formats.offload else kept
        return masters, optax.ScaleByAdamState(jnp.int32(0), *moments)

    def peaks(g: Array, mu: Stored) -> tuple[Array, Array]:
        """The largest of each block of the new first moment, if gradients are not clipped, and if they are
        clipped to 0: it is no more than between the two when they are clipped by a factor between."""
        before = cfg.b1 * decode(mu)
        return block_amax(before + (1 - cfg.b1) * g), block_amax(before)

    def update(grads: Params, scale: Array, state: optax.ScaleByAdamState, params: Params,
               finite: Array) -> tuple:
        sums, ahead = lambda g: jnp.sum(blocks(g * g), -1), formats.first == "float8" and not formats.offload
        seen = jax.tree.map(lambda g, mu: (sums(g), *(peaks(scale * g, mu) if ahead else ())), grads,
                            state.mu)
        # all that is looked at before anything is written, in a pass of its own: else XLA makes one, slow, of
        # the two
        if ahead:
            seen, grads, state, params = jax.lax.optimization_barrier((seen, grads, state, params))
        seen = jax.tree.structure(grads).flatten_up_to(seen)
        norm = scale * jnp.sqrt(sum(jnp.sum(squares) for squares, *_ in seen))
        ok, clip = finite & jnp.isfinite(norm), jnp.minimum(1.0, cfg.clip_norm / norm)
        rate, count = schedule(state.count), state.count + 1
        unbias = [1 / (1 - jnp.float32(b) ** count) for b in (cfg.b1, cfg.b2)]

        def leaf(number: int, path: tuple, grads: Array, *kept: Stored) -> tuple[Stored, ...]:
            decay = 0.0 if "norm" in jax.tree_util.keystr(path) else cfg.weight_decay

            def step(first: Array | int, g: Array, kept: tuple[Stored, ...]) -> tuple[Stored, ...]:
                param, mu, nu = map(decode, kept)
                free, still = (seen[number][1:]
                               or peaks(scale * g, kept[1])) if is_scaled(kept[1]) else (0.0, 0.0)
                amax = None, MARGIN * (clip * free + (1 - clip) * still), None
                g *= scale * clip
                mu = cfg.b1 * mu + (1 - cfg.b1) * g
                nu = cfg.b2 * nu + (1 - cfg.b2) * g * g
                direction = unbias[0] * mu / (jnp.sqrt(unbias[1] * nu) + cfg.eps)
                param -= rate * (direction + decay * param if decay else direction)
                words = random_bits(salts[number], first, g.shape)
                after = tuple(map(encode, (param, mu, nu), formats[:3], words, FAINT, amax))
                return jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, kept)

            return _from_host(step, grads, kept,
                              path[0].key == "layers") if formats.offload else step(0, grads, kept)

        paths, tree = jax.tree_util.tree_flatten_with_path(grads)
        salts = jax.random.bits(jax.random.fold_in(jax.random.key(0), state.count), (len(paths), 2),
                                jnp.uint32)
        kept = (tree.flatten_up_to(t) for t in (params, state.mu, state.nu))
        leaves = [leaf(n, path, g, *x) for n, ((path, g), *x) in enumerate(zip(paths, *kept))]
        params, mu, nu = map(tree.unflatten, zip(*leaves))
        return params, optax.ScaleByAdamState(state.count + ok, mu, nu), norm

    return Optimizer(init, update)


_nearest = jax.jit(encode, static_argnums=1)  # jitted, so that nothing of a stack's size stands beside it


def _from_host(step: Callable, grads: Array, kept: tuple[Stored, ...], stacked: bool) -> tuple[Stored, ...]:
    """`step` with moments that are fetched and put back, a layer of a stack [L, ...] at a time, each in its
    place. The barrier reads a layer before any of it is written: otherwise XLA copies the whole stack first.
    """

    def layer(i: Array, kept: tuple[Stored, ...]) -> tuple[Stored, ...]:
        row = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1)
        read = jax.lax.optimization_barrier((row(grads), _fetch(jax.tree.map(row, kept))))
        write = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, i, 0)
        return jax.tree.map(write, kept, _stow(step(i, *read)))

    return jax.lax.fori_loop(0, len(grads), layer, kept) if stacked else _stow(step(0, grads, _fetch(kept)))


def _fetch(kept: tuple) -> tuple:
    """(masters, moments...), the moments from pinned host memory."""
    return kept[0], *jax.device_put(kept[1:], jax.memory.Space.Device)


def _stow(kept: tuple) -> tuple:
    return kept[0], *jax.device_put(kept[1:], jax.memory.Space.Host)


def from_optax(transformation: optax.GradientTransformation) -> Optimizer:
    """Any optax transformation, of float32 parameters."""

    def update(grads: Params, scale: Array, state: Any, params: Params, finite: Array) -> tuple:
        norm = scale * optax.tree.norm(grads)

        def apply() -> tuple[Params, Any]:
            updates, new = transformation.update(jax.tree.map(lambda g: g * scale, grads), state, params)
            return optax.apply_updates(params, updates), new

        return *jax.lax.cond(finite & jnp.isfinite(norm), apply, lambda: (params, state)), norm

    return Optimizer(lambda params: (params, transformation.init(params)), update)


def init_state(
    params: Params, optimizer: Optimizer | optax.GradientTransformation, compute_dtype: str = "float32"
) -> TrainState:
    """A fresh TrainState around float32 parameters, which become its masters; under float16 with a loss
    scale."""
    steps, bad, good = (jnp.zeros((), jnp.int32) for _ in range(3))  # three buffers: each is donated
    masters, opt_state = _ours(optimizer).init(params)
    return TrainState(steps, masters, opt_state, bad, jnp.float32(first_loss_scale(compute_dtype)), good)


def first_loss_scale(compute_dtype: str) -> float:
    return FIRST_LOSS_SCALE if compute_dtype == "float16" else 1.0


def rescaled(state: TrainState, compute_dtype: str) -> TrainState:
    """A state of another run: with a loss scale exactly where `compute_dtype` asks for one, in the memory
    that it was in."""
    if bool(state.loss_scale > 1) == (compute_dtype == "float16"):
        return state
    scale = 0 * state.loss_scale + first_loss_scale(compute_dtype)
    return state._replace(loss_scale=scale, good_steps=0 * state.good_steps)


def _ours(optimizer: Optimizer | optax.GradientTransformation) -> Optimizer:
    return optimizer if isinstance(optimizer, Optimizer) else from_optax(optimizer)


def guarded_update(
    optimizer: Optimizer | optax.GradientTransformation, state: TrainState, loss: Array, grads: Params,
    live: Array | bool = True
) -> tuple[TrainState, StepMetrics]:
    """Apply `grads`, the gradients times state.loss_scale, unless the loss or their global norm is not
    finite; then keep every byte of params and optimiser state and count up `bad_steps`.
    (optax.apply_if_finite applies the bad update after N in a row: a delay, not a guard.) Every byte is also
    kept where nothing is `live`: Adam's momentum is no reason to move by itself. Such an update is neither
    good nor bad, unless it is not finite: both counts in a row stay.

    With a loss scale above 1 a finite loss with gradients that overflowed is no bad step: the scale is
    halved; it doubles after LOSS_SCALE_PATIENCE good updates in a row (Micikevicius et al. 2018, "Mixed
    Precision Training", section 3.2). At 2 it is halved no more, since 1 is none at all: gradients that
    overflow then are a bad step.
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
    new = TrainState(
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
