"""The two boundaries of a computation that devices share, each with weights of its own: f and g of
Megatron-LM (Shoeybi et al. 2019, section 3).

They are for a `shard_map` with `check_vma=False`, which kernels need, with derivatives taken inside it. JAX
does not know there whether an array is the same on all devices. The input of `enter` is, and so are the
result of `leave` and its cotangent.
"""

from __future__ import annotations

import functools

import jax
from jax import Array, lax


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enter(x: Array, axis: str) -> Array:
    """x, which is the same on all devices of `axis`; each computes its part with it. The backward pass sums
    their gradients."""
    return x


enter.defvjp(lambda x, axis: (x, None), lambda axis, _, dx: (lax.psum(dx, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leave(part: Array, axis: str) -> Array:
    """The sum of the parts of all devices of `axis`. In the backward pass every part gets the gradient of the
    sum."""
    return lax.psum(part, axis)


leave.defvjp(lambda part, axis: (lax.psum(part, axis), None), lambda axis, _, dy: (dy,))
