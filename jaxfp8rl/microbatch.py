"""Functions of a batch, and their gradients, computed one micro-batch at a time.

The gradients of micro-batches are summed in float32, or in bfloat16 with stochastic rounding
(jaxfp8rl.optim.low_bit.add_to). A layer's gradient is added to its sum as soon as
autodiff computes it, before the next layer's is computed, so at most one layer's gradient of a micro-batch
exists at a time. For this the sums travel with the activations, unread (`accumulate_grad`), and come back
down the layers in the backward pass, where autodiff takes them for a cotangent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.optim.low_bit import add_to
from jaxfp8rl.types import Params


def map_live(f: Callable, batch: Any, live: Array | None = None) -> Any:
    """`f` of each micro-batch of `batch` [M, R, T], a TrainBatch or any tree, stacked. Micro-batches without
    a response, or not `live` [M] if given, are skipped and give zeros."""
    live = batch.response_mask.any((1, 2)) if live is None else live
    nothing = zeros(jax.eval_shape(f, jax.tree.map(lambda x: x[0], batch)))
    return jax.lax.map(lambda micro: jax.lax.cond(micro[1], f, lambda _: nothing, micro[0]), (batch, live))


def zeros(like: Any) -> Any:
    """A tree of zeros with the shapes and dtypes of `like`."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)


def accumulate(
    loss_fn: Callable, outer: Params, sums: Params, batch: tuple, live: Array, loss_scale: Array,
    beside: Callable | None = None,
) -> tuple[Array, dict[str, Array], Params]:
    """(sum of the losses, `seen` of each micro-batch, sum of the gradients times `loss_scale`) of
    `loss_fn(outer, layers, micro) -> (loss, seen)` over the leading axis of `batch`.

    outer: the weights outside the layers. sums: zeros with the shapes of all gradients, float32 or bfloat16.
    Those under "layers" are the ones that the loss passes to `accumulate_grad`, which is how it is
    differentiated by the layers' weights.

    The loss is multiplied by `loss_scale` on its way back through the model, so that small gradients survive
    float16. Micro-batches that are not `live` [M] are skipped, not computed and discarded; their `seen` is
    zero.

    beside(micro, seen) -> (other gradients, seen): what learns from a micro-batch's `seen`, which is constant
    to it. Its gradients are summed like the others, in `sums` under their names.
    """

    def scaled(outer: Params, layers: Params, micro: tuple) -> tuple:
        value, seen = loss_fn(outer, layers, micro)
        return value * loss_scale, (value, seen)

    def add(value: Array, sums: Params, micro: tuple) -> tuple:
        (grads, layers), (new, seen) = jax.grad(scaled, (0, 1), has_aux=True)(outer, sums["layers"], micro)
        if beside:
            more, seen = beside(micro, jax.lax.stop_gradient(seen))
            grads |= more
        added = {name: jax.tree.map(add_to, sums[name], g) for name, g in grads.items()}
        return (value + new, {**added, "layers": layers}), jax.lax.stop_gradient(seen)

    nothing = zeros(jax.eval_shape(add, jnp.float32(0), sums, jax.tree.map(lambda x: x[0], batch))[1])

    def body(total: tuple[Array, Params], step: tuple) -> tuple:
        return jax.lax.cond(step[1], lambda: add(*total, step[0]), lambda: (total, nothing))

    (value, grads), seen = jax.lax.scan(body, (jnp.float32(0), sums), (batch, live))
    return value, seen, grads


@jax.custom_vjp
def accumulate_grad(weights: Params, sums: Params, i: Array) -> tuple[Params, Params]:
    """(weights [...] of layer i, sums [L, ...]), unchanged. The backward pass adds the gradient of the
    weights to entry i of the cotangent of the sums, and nowhere else."""
    return weights, sums


def _tap_bwd(i: Array, cotangents: tuple[Params, Params]) -> tuple[None, Params, None]:
    # as [1, ...], because XLA otherwise copies a layer out before it adds
    def add(grad: Array, into: Array) -> Array:
        row = add_to(jax.lax.dynamic_slice_in_dim(into, i, 1), grad[None])
        return jax.lax.dynamic_update_slice_in_dim(into, row, i, 0)

    return None, jax.tree.map(add, *cotangents), None


accumulate_grad.defvjp(lambda weights, sums, i: ((weights, sums), i), _tap_bwd)


@jax.custom_vjp
def start_backward(x: Array, sums: Params) -> Array:
    """x. In the backward pass, the sums themselves start their way down the layers here."""
    return x


start_backward.defvjp(lambda x, sums: (x, sums), lambda sums, dx: (dx, sums))
