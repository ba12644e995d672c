"""Values without derivatives of their own, for what an engine computes in another order than the learner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.weights import WeightWithGradSlot, as_quantized


@jax.custom_vjp
def with_gradient_of(value: Array, plain: Array) -> Array:
    """value; its derivative is that of `plain`, of the same shape and type."""
    return value


with_gradient_of.defvjp(lambda value, plain: (value, None), lambda _, g: (jnp.zeros_like(g), g))


def constant(tree: Any) -> Any:
    """The same tree without derivatives, and its weights without places for gradients."""
    is_weight = lambda w: isinstance(w, WeightWithGradSlot)
    plain = jax.tree.map(lambda w: as_quantized(w)[0] if is_weight(w) else w, tree, is_leaf=is_weight)
    return jax.tree.map(jax.lax.stop_gradient, plain)
