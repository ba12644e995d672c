"""AdamW with global-norm clipping, on masters and moments of any format.

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

from jaxfp8rl.config.learning import Optim
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
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.types import Params

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

