"""The mixture of experts of a sparse layer (Qwen3-MoE): a router in float32, and every expert's SwiGLU on the
tokens it is given.

Letters as in models/transformer.py; E experts, k of them a token. A token's experts are named in ascending
order, so that the sum over them has one order, whoever chose them: the router, or who replays another's
routes. Routes are kept in the narrowest unsigned integers, of which the largest number stands for "as the
router says" (`no_route`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.distributed.mesh import ONE, MeshLayout
from jaxfp8rl.models.config import Experts
from jaxfp8rl.models.layers import swiglu
from jaxfp8rl.precision.experts import combine_tokens, dispatch, grouped_linear, is_expert
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.precision.records import Precision

HIGHEST = jax.lax.Precision.HIGHEST


class Routing(NamedTuple):
    """What the routers of layers said: `ids` [..., B, T, k], their own choice; `balance` [...] float32, the
    load-balancing loss of what was computed, 1 where all experts have as much to do."""

    ids: Array
    balance: Array


def route_dtype(experts: Experts) -> np.dtype:
    """What a route is kept in: as narrow as holds every expert and `no_route`."""
    return np.dtype(np.uint8 if experts.num_experts <= np.iinfo(np.uint8).max else np.uint16)


def no_route(dtype: Any) -> int:
    return np.iinfo(dtype).max


def moe_block(
    x_BTD: Array, w: dict, experts: Experts, precision: Precision, fp8: bool,
    live_BT: Array | None = None, routes_BTk: Array | None = None, layout: MeshLayout = ONE,
) -> tuple[Array, Routing]:
    """The MLP of a sparse layer, in x's dtype, and what its router said.

    live_BT: tokens that are no padding; others are given to no expert, and get zeros. routes_BTk: the experts
    to take in place of the router's choice; a number of no expert, below 0 or too large, is left out. Their
    gates are the router's all the same, over those experts, so that it learns. layout: of several devices
    along "tensor" each computes its own experts, of all tokens.
    """
    x = x_BTD.reshape(-1, x_BTD.shape[-1])
    logits = _router_logits(x, w["gate"]["weight"], experts, precision.rounding.router_dtype)
    own = jnp.sort(jax.lax.top_k(logits, experts.num_experts_per_tok)[1], -1)
    ids = own if routes_BTk is None else _replayed(routes_BTk.reshape(own.shape), own)
    gates, x = layout.copy_to_tensor_parallel(_gates(logits, ids, experts)), layout.copy_to_tensor_parallel(x)
    live = None if live_BT is None else live_BT.reshape(-1, 1)
    here, count = layout.experts(ids, experts.num_experts)
    d = dispatch(here if live is None else jnp.where(live, here, count), count)

    def product(x: Array, name: str, of_tokens: bool = False) -> Array:
        return grouped_linear(x, w["experts"][name]["weight"], d, precision, fp8, of_tokens)

    y = product(swiglu(product(x, "gate_proj", True), product(x, "up_proj", True)), "down_proj")
    y_TD = layout.reduce_from_tensor_parallel(
        jnp.sum(gates[..., None] * combine_tokens(y, d).astype(jnp.float32), 1)).astype(x.dtype)
    kept = own.astype(route_dtype(experts)).reshape(*x_BTD.shape[:2], -1)
    return y_TD.reshape(x_BTD.shape), Routing(kept, _balance(logits, layout.join(d.groups.sizes), live))


def _router_logits(x_TD: Array, weight_ED: Array, experts: Experts, dtype: str) -> Array:
    """[T, E] float32, summed in float32 and rounded to `dtype` as the engine's are, which makes ties; the
    gradient is not."""
    weight = jax.lax.stop_gradient(weight_ED) if experts.frozen_router else weight_ED
    logits = jnp.einsum("td,ed->te", x_TD.astype(jnp.float32), weight.astype(jnp.float32), precision=HIGHEST)
    return logits if dtype == "float32" else logits + jax.lax.stop_gradient(round_to(logits, dtype) - logits)


def _replayed(routes_Tk: Array, own_Tk: Array) -> Array:
    given = jnp.sort(routes_Tk.astype(jnp.int32), -1)
    return jnp.where(given[:, -1:] == no_route(routes_Tk.dtype), own_Tk, given)


def _gates(logits_TE: Array, ids_Tk: Array, experts: Experts) -> Array:
    """[T, k] float32: the softmax of the router's logits over all experts, or if `norm_topk_prob` over those
    of the token; 0 for a number of no expert."""
    real = is_expert(ids_Tk, experts.num_experts)
    chosen = jnp.take_along_axis(logits_TE, jnp.where(real, ids_Tk, 0), 1)
    chosen = jnp.where(real, chosen, jnp.finfo(jnp.float32).min)
    total = jax.nn.logsumexp(logits_TE, 1, keepdims=True)
    return jnp.where(real, jax.nn.softmax(chosen) if experts.norm_topk_prob else jnp.exp(chosen - total), 0)


def _balance(logits_TE: Array, sizes_E: Array, live_T1: Array | None) -> Array:
    """E times the sum over experts of their share of the copies and the mean of their probabilities (Fedus et
    al. 2021, equation 4, of k copies a token)."""
    probs = jax.nn.softmax(logits_TE)
    mean = probs.mean(0) if live_T1 is None else jnp.sum(jnp.where(live_T1, probs, 0),
                                                         0) / jnp.maximum(live_T1.sum(), 1)
    return sizes_E.size * jnp.sum(sizes_E / jnp.maximum(sizes_E.sum(), 1) * mean)
