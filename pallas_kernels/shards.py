"""The two seams of a computation that devices share, each with weights of its own: f and g of Megatron-LM
(Shoeybi et al. 2019, section 3).

For a `shard_map` with `check_vma=False`, which kernels want, and derivatives taken inside it. There JAX
cannot know that an array is the same on all devices, so both say it: what comes in through `enter` is, and so
are what `leave` gives and its cotangent.
"""

from __future__ import annotations

import functools

import jax
from jax import Array, lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: Array, axis: str) -> Array:
    """x, the same on all devices of `axis`, for each of them to compute its part with. Backwards their
    gradients are summed."""
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, dx: (lax.psum(dx, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(part: Array, axis: str) -> Array:
    """The sum of the parts of all devices of `axis`. Backwards every part has the sum's gradient."""
    return lax.psum(part, axis)


leave.defvjp(lambda part, axis: (lax.psum(part, axis), None), lambda axis, _, dy: (dy,))
