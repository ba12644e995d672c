"""AdamW with global-norm clipping, on masters and moments of any format.

Masters and moments are kept in the formats that `optim` names (jaxfp8rl.optim.low_bit). They are read,
updated and written in place, in one elementwise pass after a first pass for norms and bounds. Besides them
and the gradients an update needs almost no memory (docs/notebook_optimizer.md). Moments in host memory are
transferred one layer of one parameter at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

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
from jaxfp8rl.roles import role_of
from jaxfp8rl.types import Params

# The rounding of numbers that are too small for the digits of their format: masters, first and second
# moments. Moments are rounded so that the step gets smaller: a first moment rounded up, or a second one
# rounded to 0, would make a step of a thousand learning rates.
FAINT = ("stochastic", "down", "up")
HOST = jax.memory.Space.Host  # pinned
MARGIN = 1 + 2.0**-20  # factor of a bound on numbers that are recomputed and may then round differently


class Optimizer(NamedTuple):
    """An optax.GradientTransformation whose update gives the new parameters themselves, because only it can
    round them.

    init(params float32 or bfloat16) -> (parameters as they are kept, state)
    update(grads float32 or bfloat16, scale, state, params, finite) -> (params, state, global norm)

    The gradients are grads * scale. Unless `finite`, a traced bool, and the norm is finite, params and state
    are the very bytes that came in.
    """

    init: Callable[[Params], tuple[Params, Any]]
    update: Callable[[Params, Array, Any, Params, Array], tuple[Params, Any, Array]]


class Formats(NamedTuple):
    """The formats of masters and moments between updates, and whether the moments are in pinned host
    memory."""

    master: Format = "float32"
    first: Format = "float32"
    second: Format = "float32"
    offload: bool = False


def make_optimizer(cfg: Optim, updates: int) -> Optimizer:
    """Clip by global norm, then AdamW. Weight decay spares what jaxfp8rl.roles says, norms."""
    return adamw(cfg, make_schedule(cfg, updates),
                 Formats(cfg.master, cfg.first_moment, cfg.second_moment, cfg.offload))


def adamw(cfg: Optim, schedule: optax.Schedule, formats: Formats) -> Optimizer:
    """optax.adamw after optax.clip_by_global_norm, in float32 between reading and rounding. The state is an
    optax.ScaleByAdamState, its moments in their formats. The bits that round are drawn by (count, leaf,
    place)."""
    chain = _AdamW(cfg, schedule, formats)
    return Optimizer(chain.init, chain.update)


class _Bounds(NamedTuple):
    """The largest of each block of the new first moment, [..., ceil(K/128)], if gradients are not clipped,
    and if they are clipped to 0. When they are clipped by a factor between, it is at most between the two."""

    free: Array
    still: Array


class _Now(NamedTuple):
    """The scalars of one update. `gain` is the factor of the gradients: scale times clip."""

    ok: Array  # whether the update is applied
    scale: Array
    clip: Array
    gain: Array
    rate: ArrayLike
    unbias: tuple[Array, Array]  # factors of the two moments


class _AdamW(NamedTuple):
    cfg: Optim
    schedule: optax.Schedule
    formats: Formats

    def init(self, params: Params) -> tuple[Params, optax.ScaleByAdamState]:
        # one at a time: parameters on the host are on the device twice on their way, and moments of the host
        # are made on the device
        each = lambda make: jax.tree.map(lambda p: jax.block_until_ready(make(p)), params)
        place = functools.partial(jax.device_put, device=HOST) if self.formats.offload else lambda x: x
        moment = lambda kept_as: each(lambda p: place(zeros(p.shape, kept_as)))
        first, second = moment(self.formats.first), moment(self.formats.second)
        masters = each(lambda p: _nearest(p, self.formats.master))
        return masters, optax.ScaleByAdamState(jnp.int32(0), first, second)

    def update(self, grads: Params, scale: Array, state: optax.ScaleByAdamState, params: Params,
               finite: Array) -> tuple[Params, optax.ScaleByAdamState, Array]:
        squares, bounds, (grads, state, params) = self._look_ahead(scale, grads, state, params)
        norm = scale * jnp.sqrt(sum(map(jnp.sum, squares)))
        now = self._now(scale, norm, finite, state.count)
        paths, tree = jax.tree_util.tree_flatten_with_path(grads)
        salts = jax.random.bits(jax.random.fold_in(jax.random.key(0), state.count), (len(paths), 2),
                                jnp.uint32)
        kept = zip(*(tree.flatten_up_to(t) for t in (params, state.mu, state.nu)))
        leaves = [self._leaf(now, path, g, x, bound, salt)
                  for (path, g), x, bound, salt in zip(paths, kept, bounds, salts)]
        params, mu, nu = map(tree.unflatten, zip(*leaves))
        return params, optax.ScaleByAdamState(state.count + now.ok, mu, nu), norm

    def _look_ahead(self, scale: Array, grads: Params, state: optax.ScaleByAdamState, params: Params
                    ) -> tuple[list[Array], list[_Bounds | None], tuple]:
        """The sums of squares of each leaf's blocks, and the bounds of its first moment if that is float8 on
        the device; and the arguments, to be read after this."""
        ahead = self.formats.first == "float8" and not self.formats.offload

        def look(g: Array, mu: Stored) -> tuple[Array, _Bounds | None]:
            g = g.astype(jnp.float32)
            return jnp.sum(blocks(g * g), -1), self._bounds(scale * g, mu) if ahead else None

        seen = jax.tree.map(look, grads, state.mu)
        rest = grads, state, params
        if ahead:  # a pass of its own: otherwise XLA makes one of the two, which is slow
            seen, rest = jax.lax.optimization_barrier((seen, rest))
        squares, bounds = zip(*jax.tree.structure(grads).flatten_up_to(seen))
        return list(squares), list(bounds), rest

    def _bounds(self, g: Array, mu: Stored) -> _Bounds:
        before = self.cfg.b1 * decode(mu)
        return _Bounds(block_amax(before + (1 - self.cfg.b1) * g), block_amax(before))

    def _now(self, scale: Array, norm: Array, finite: Array, count: ArrayLike) -> _Now:
        clip = jnp.minimum(1.0, self.cfg.clip_norm / norm)
        first, second = (1 / (1 - jnp.float32(b) ** (count + 1)) for b in (self.cfg.b1, self.cfg.b2))
        return _Now(finite & jnp.isfinite(norm), scale, clip, scale * clip, self.schedule(count),
                    (first, second))

    def _leaf(self, now: _Now, path: tuple, grads: Array, kept: tuple[Stored, ...], bounds: _Bounds | None,
              salt: Array) -> tuple[Stored, ...]:
        """(master, first moment, second moment) of one leaf after the update, as they are kept."""
        decay = self.cfg.weight_decay if role_of(path).decays else 0.0

        def step(first: Array | int, g: Array, kept: tuple[Stored, ...]) -> tuple[Stored, ...]:
            g = g.astype(jnp.float32)
            amax = self._first_amax(now, g, kept[1], bounds) if is_scaled(kept[1]) else None
            words = random_bits(salt, first, g.shape)
            moved = self._move(now, decay, g * now.gain, *map(decode, kept))
            after = tuple(map(encode, moved, self.formats[:3], words, FAINT, (None, amax, None)))
            return jax.tree.map(lambda new, old: jnp.where(now.ok, new, old), after, kept)

        if not self.formats.offload:
            return step(0, grads, kept)
        return _from_host(step, grads, kept, path[0].key == "layers")

    def _first_amax(self, now: _Now, g: Array, mu: Stored, bounds: _Bounds | None) -> Array:
        free, still = bounds or self._bounds(now.scale * g, mu)
        return MARGIN * (now.clip * free + (1 - now.clip) * still)

    def _move(self, now: _Now, decay: float, g: Array, param: Array, mu: Array, nu: Array
              ) -> tuple[Array, Array, Array]:
        """AdamW (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2)."""
        mu = self.cfg.b1 * mu + (1 - self.cfg.b1) * g
        nu = self.cfg.b2 * nu + (1 - self.cfg.b2) * g * g
        direction = now.unbias[0] * mu / (jnp.sqrt(now.unbias[1] * nu) + self.cfg.eps)
        return param - now.rate * (direction + decay * param if decay else direction), mu, nu


@functools.partial(jax.jit, static_argnums=1)  # so that nothing of a stack's size stands beside it
def _nearest(param: Array, kept_as: Format) -> Stored:
    return encode(param.astype(jnp.float32), kept_as)


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
    return kept[0], *jax.device_put(kept[1:], HOST)

