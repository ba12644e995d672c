"""The policy: the rounded and quantised weights that score, update and publish share.

The masters are rounded to it once an update. Since there is only one copy, the engine and the learner's FP8
forward pass hold equal bytes. Its leaves are arrays of the masters' shapes in `compute_dtype`, rounded to
`weight_dtype` first, and QuantizedWeights where the learner's forward is FP8. `layers` is a tuple of stacks,
one for each run of layers with equal precision. The calibration of FP8 attention adds "kv_scales"
(jaxfp8rl.precision.kv_scales), which have no gradient.

With low-rank adapters, the masters are the adapters alone: `{"layers": {"lora": ...}}`. What their rounding
gives is a part of the policy. The other part, the base, does not learn (`over_base`). Weights of a base in
four bits are FourBits, as they were read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.models.transformer import split_layers
from jaxfp8rl.optim.low_bit import Stored, decode, is_scaled
from jaxfp8rl.precision.adapters import LORA, is_adapter
from jaxfp8rl.precision.four_bits import FourBits, is_packed_leaf
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import EngineWeight, QuantizedWeight, grad_slots_of
from jaxfp8rl.types import Params


def policy_of(params: Params, precision: Precision, codes: bool = True) -> Params:
    """Masters (one stack of layers) -> policy. Without `codes`, quantised weights are None."""

    def round_one(path: tuple, p: Stored | FourBits) -> Array | FourBits:
        if isinstance(p, FourBits):
            return p
        if precision.adapters and is_adapter(path):
            return round_to(decode(p), precision.adapters.dtype).astype(precision.adapters.dtype)
        return round_to(decode(p), precision.weight_dtype).astype(precision.compute_dtype)

    rounded = jax.tree_util.tree_map_with_path(round_one, params,
                                              is_leaf=lambda p: is_scaled(p) or is_packed_leaf(p))
    policy = split_layers(rounded, precision)
    quantize = QuantizedWeight.of if codes else lambda weight: None
    stacks = tuple(_quantize(stack, run.fp8, quantize)
                   for stack, run in zip(policy["layers"], precision.runs))
    return {**policy, "layers": stacks}


def _quantize(stack: Params, modules: frozenset[str], quantize: Callable) -> Params:
    """A stack of layers with the weights of the linears in `modules` ("q_proj", ...) quantised."""
    return {
        name: {**node, "weight": quantize(node["weight"])} if name in modules
        else _quantize(node, modules, quantize) if isinstance(node, dict) and name != LORA else node
        for name, node in stack.items()
    }


def grad_slots(policy: Params, dtype: str) -> Params:
    """The tree with respect to which a loss is differentiated: the policy's float leaves, and zeros of
    `dtype` in place of quantised leaves."""
    return grad_slots_of(without_scales(policy), dtype)


def gradients_like(policy: Params, dtype: str = "float32") -> Params:
    """Zeros with the shapes of a policy's gradients, in one stack of layers like the masters: those of the
    adapters alone if it has any."""
    policy = adapters_in(policy) or policy
    wide = jax.eval_shape(lambda policy: as_params(grad_slots(policy, "float32")), policy)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, dtype), wide)


def outer(policy: Params) -> Params:
    """The weights outside the layers that learn."""
    if adapters_in(policy):
        return {}
    return {name: node for name, node in policy.items() if name not in ("layers", "kv_scales")}


def adapters_in(policy: Params) -> Params:
    """The part of a policy that its adapters are; {} if it has none."""
    found = tuple({LORA: stack[LORA]} for stack in policy["layers"] if LORA in stack)
    return {"layers": found} if found else {}


def over_base(adapters: Params, base: Params) -> Params:
    """The policy of adapters, as `policy_of` gives it, and a base without any."""
    return {**base, "layers": tuple(map(operator.or_, base["layers"], adapters["layers"]))}


def without_adapters(policy: Params) -> Params:
    """The base of a policy."""
    bare = ({name: node for name, node in stack.items() if name != LORA} for stack in policy["layers"])
    return {**policy, "layers": tuple(bare)}


def scales_in(policy: Params) -> Params:
    """{"kv_scales": ...} if the policy has them, else {}."""
    return {name: policy[name] for name in ("kv_scales",) if name in policy}


def without_scales(policy: Params) -> Params:
    return {name: node for name, node in policy.items() if name != "kv_scales"}


def as_params(tree: Params) -> Params:
    """Join the stacks of layers of a tree, one a run, to a single stack like that of the masters."""
    stacks = tree["layers"]
    if len(stacks) == 1:
        return {**tree, "layers": stacks[0]}
    parts = {name: [stack[name] for stack in stacks if name in stack]
             for name in dict.fromkeys(n for s in stacks for n in s)}
    return {**tree, "layers": {name: jax.tree.map(lambda *xs: jnp.concatenate(xs), *nodes)
                               for name, nodes in parts.items()}}


def with_engine_weights(policy: Params, precision: Precision,
                        lend: Callable[[Sequence[str]], tuple]) -> Params:
    """Fill a policy without codes with the codes in the engine's memory.

    `lend` takes the HF names of one linear in consecutive layers, and returns the fused codes [L, R, K],
    their scales, and the first and last row of the linear in them.
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
    """Split a policy into (weights in the learner's memory, weights in the engine's memory), or one with
    adapters into (adapters, base).

    Each tree has None in place of the other's leaves, or lacks them. Only the first may be donated.
    """
    if adapters := adapters_in(policy):
        return adapters, without_adapters(policy)

    def pick(lent: bool) -> Params:
        return jax.tree.map(lambda w: w if _is_lent(w) == lent else None, policy, is_leaf=_is_lent)

    return pick(False), pick(True)


def combine(learner_weights: Params, engine_weights: Params) -> Params:
    """The inverse of `partition`."""
    if adapters := adapters_in(learner_weights):
        return over_base(adapters, engine_weights)
    return jax.tree.map(lambda a, b: b if a is None else a, learner_weights, engine_weights,
                        is_leaf=lambda w: w is None or _is_lent(w))
