"""The policy: what the masters are rounded to, once an update, for everything that computes with it.

Score, update and publish take the same tree, so the engine and the learner's FP8 forward hold equal bytes
because there is but one copy of them. Its leaves are arrays of the masters' shapes in `compute_dtype`,
rounded to `weight_dtype` first, and QuantizedWeights where the learner's forward is FP8. `layers` is a tuple
of stacks, one for each run of equal precision. Whoever calibrates FP8 attention adds "kv_scales"
(jaxfp8rl.precision.kv_scales), which no gradient concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp8rl.models.transformer import split_layers
from jaxfp8rl.optim.low_bit import decode, is_scaled
from jaxfp8rl.precision.linear import EngineWeight, QuantizedWeight, grad_slots_of, round_to
from jaxfp8rl.precision.recipe import LayerRun, Precision
from jaxfp8rl.types import Params


def policy_of(params: Params, precision: Precision, codes: bool = True) -> Params:
    """Masters (one stack of layers) -> policy; unless `codes`, with None for what is quantised."""
    round_one = lambda p: round_to(decode(p), precision.weight_dtype).astype(precision.compute_dtype)
    rounded = jax.tree.map(round_one, params, is_leaf=is_scaled)
    policy = split_layers(rounded, precision)
    quantize = QuantizedWeight.of if codes else lambda weight: None
    stacks = tuple(_quantize(stack, run.fp8, quantize)
                   for stack, run in zip(policy["layers"], precision.runs))
    return {**policy, "layers": stacks}


def _quantize(stack: Params, modules: frozenset[str], quantize: Callable) -> Params:
    """Every product of `modules` ("q_proj", ...) in a stack of layers."""
    return {
        name: {"weight": quantize(node["weight"])} if name in modules
        else _quantize(node, modules, quantize) if isinstance(node, dict) else node
        for name, node in stack.items()
    }


def grad_slots(policy: Params, dtype: str) -> Params:
    """What a loss is differentiated by: the policy's float leaves themselves, and zeros of `dtype` for
    quantised ones."""
    return grad_slots_of(without_scales(policy), dtype)


def gradients_like(policy: Params) -> Params:
    """Zeros, float32, of the shapes of a policy's gradients: one stack of layers, as the masters have it."""
    wide = jax.eval_shape(lambda policy: as_params(grad_slots(policy, "float32")), policy)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), wide)


def outer(policy: Params) -> Params:
    """The weights outside the layers."""
    return {name: node for name, node in policy.items() if name not in ("layers", "kv_scales")}


def scales_in(policy: Params) -> Params:
    """{"kv_scales": ...} where the policy has them, else {}."""
    return {name: policy[name] for name in ("kv_scales",) if name in policy}


def without_scales(policy: Params) -> Params:
    return {name: node for name, node in policy.items() if name != "kv_scales"}


def as_params(tree: Params) -> Params:
    """A tree with one stack of layers a run -> one stack, as the masters have it."""
    stacks = tree["layers"]
    if len(stacks) == 1:
        return {**tree, "layers": stacks[0]}
    parts = {name: [stack[name] for stack in stacks if name in stack]
             for name in dict.fromkeys(n for s in stacks for n in s)}
    return {**tree, "layers": {name: jax.tree.map(lambda *xs: jnp.concatenate(xs), *nodes)
                               for name, nodes in parts.items()}}


def with_engine_weights(policy: Params, precision: Precision,
                        lend: Callable[[Sequence[str]], tuple]) -> Params:
    """A policy without codes -> the same with those in the engine's memory. `lend(HF names of one linear in
    consecutive layers)` -> (fused codes [L, R, K], scales, and the first and last row of the linear in them).
    """

    def filled(node: Any, run: LayerRun, path: str) -> Any:
        if node is None:
            return EngineWeight(*lend([f"model.layers.{i}.{path}" for i in range(run.start, run.stop)]))
        if not isinstance(node, dict):
            return node
        return {key: filled(value, run, f"{path}.{key}".lstrip(".")) for key, value in node.items()}

    return {**policy,
            "layers": tuple(filled(stack, run, "") for stack, run in zip(policy["layers"], precision.runs))}


def _is_lent(leaf: Any) -> bool:
    return isinstance(leaf, EngineWeight)


def partition(policy: Params) -> tuple[Params, Params]:
    """(what is the learner's own, what is the engine's), each with None for the other: one may be donated,
    the other never."""

    def pick(lent: bool) -> Params:
        return jax.tree.map(lambda w: w if _is_lent(w) == lent else None, policy, is_leaf=_is_lent)

    return pick(False), pick(True)


def combine(own: Params, lent: Params) -> Params:
    """The policy that was `parted`."""
    return jax.tree.map(lambda a, b: b if a is None else a, own, lent,
                        is_leaf=lambda w: w is None or _is_lent(w))
