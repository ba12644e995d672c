"""Functions of a batch, and their gradients, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.types import Params, TrainBatch


def map_live(f: Callable, batch: TrainBatch, live: Array | None = None) -> Any:
    """`f` of each micro-batch of `batch` [M, R, T], stacked; zeros for those without a response, or not `live` [M] if these are
    given: they are skipped."""
    live = batch.response_mask.any((1, 2)) if live is None else live
    nothing = zeros(jax.eval_shape(f, jax.tree.map(lambda x: x[0], batch)))
    return jax.lax.map(lambda micro: jax.lax.cond(micro[1], f, lambda _: nothing, micro[0]), (batch, live))


def zeros(like: Any) -> Any:
    """A tree of zeros of these shapes and dtypes."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)


def accumulate(
    loss_fn: Callable, weights: Params, batch: tuple, live: Array, loss_scale: Array
) -> tuple[Array, dict[str, Array], Params]:
    """(sum of the losses, what was seen by micro-batch, sum of the gradients in float32) of
    `loss_fn(weights, micro) -> (loss, seen)` over the leading axis of `batch`.

    The loss is multiplied by `loss_scale` on its way back through the model, so that small gradients survive float16, and the
    gradients divided by it. Micro-batches that are not `live` [M] are skipped, not computed and thrown away; they have seen
    zeros.
    """

    def scaled(weights: Params, micro: tuple) -> tuple:
        value, seen = loss_fn(weights, micro)
        return value * loss_scale, (value, seen)

    def run(micro: tuple) -> tuple:
        grads, (value, seen) = jax.grad(scaled, has_aux=True)(weights, micro)
        return (value, jax.tree.map(lambda g: g.astype(jnp.float32), grads)), jax.lax.stop_gradient(seen)

    total, seen = jax.eval_shape(run, jax.tree.map(lambda x: x[0], batch))

    def body(total: tuple, step: tuple) -> tuple:
        def add() -> tuple:
            new, seen = run(step[0])
            return jax.tree.map(jnp.add, total, new), seen

        return jax.lax.cond(step[1], add, lambda: (total, zeros(seen)))

    (value, grads), seen = jax.lax.scan(body, zeros(total), (batch, live))
    return value, seen, jax.tree.map(lambda g: g / loss_scale, grads)
