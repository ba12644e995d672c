"""Find the tensors and layers that are not finite, and name them."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.distributed.mesh import fetch
from jaxfp8rl.errors import ModelError
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import get_param, param_table
from jaxfp8rl.models.transformer import head_weight
from jaxfp8rl.optim.low_bit import Stored, decode, is_scaled
from jaxfp8rl.precision.adapters import LORA
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.probes.probes import forward_with_hooks, unquantized_policy
from jaxfp8rl.types import Params, TrainBatch

NAMED = 3  # tensors a message lists


class BadTensor(NamedTuple):
    """`bad` of `size` elements of the tensor are NaN or infinite."""

    hf_name: str
    bad: int
    size: int

    def __str__(self) -> str:
        return f"{self.hf_name} ({self.bad} of {self.size} elements)"


@functools.partial(jax.jit, static_argnums=1)
def _count_bad(x: Stored, stacked: int) -> Array:
    """Count non-finite elements over all but the first `stacked` axes: a stack of layers [L, ...] -> [L], of
    experts [L, E, ...] -> [L, E], any other tensor -> a scalar."""
    bad = ~jnp.isfinite(decode(x))
    return jnp.sum(bad, range(stacked, bad.ndim))


def bad_tensors(params: Params, model: ModelConfig) -> list[BadTensor]:
    """The tensors with non-finite elements in a tree with one stack of layers (parameters or gradients), in
    HF order."""
    if LORA in params["layers"]:
        return _bad_adapters(params)
    axes = {e.path: len(e.index) for e in param_table(model)}
    count = lambda path, x: _count_bad(x, axes[tuple(node.key for node in path)])
    counts = fetch(jax.tree_util.tree_map_with_path(count, params, is_leaf=is_scaled))
    every = (BadTensor(e.hf_name, int(get_param(counts, e)), math.prod(e.shape)) for e in param_table(model))
    return [tensor for tensor in every if tensor.bad]


def _bad_adapters(params: Params) -> list[BadTensor]:
    """`bad_tensors` of adapters, under PEFT's names without a prefix."""
    counts, found = fetch(jax.tree.map(lambda x: _count_bad(x, 1), params["layers"][LORA],
                                       is_leaf=is_scaled)), []
    shapes = jax.tree.map(lambda x: jax.eval_shape(decode, x).shape, params["layers"][LORA],
                          is_leaf=is_scaled)
    for part, modules in counts.items():
        for module, pair in modules.items():
            for name, bad in pair.items():
                size = math.prod(shapes[part][module][name][1:])
                found += [BadTensor(f"layers.{i}.{part}.{module}.{name}", int(n), size)
                          for i, n in enumerate(bad) if n]
    return found


def check_finite(params: Params, model: ModelConfig, what: str = "the model's weights") -> None:
    """Raise ModelError if `params` hold NaN or infinities, with the names of the first tensors. `what`: the
    name of the parameters in the message."""
    bad = bad_tensors(params, model)
    if bad:
        more = f" and {len(bad) - NAMED} more tensors" if len(bad) > NAMED else ""
        raise ModelError(
            f"{what} are not finite: {', '.join(map(str, bad[:NAMED]))}{more}",
            "FP8 cannot represent them: start from a good copy of the model or an earlier checkpoint",
        )


def find_nonfinite(
    params: Params, batch: TrainBatch, model: ModelConfig, precision: Precision,
    old_logp: Array | None = None,
    temperature: float = 1.0,
) -> str:
    """Describe in one sentence where an update stopped being finite: in the batch, a weight, a layer's
    product in the forward pass, or the log-probabilities. If all these are finite, it was the loss or the
    backward pass.

    batch [M, R, T] and old_logp [M, R, T] are those of the update.
    """
    fields = {"rollout_logp": batch.rollout_logp, "advantages": batch.advantages, "old_logp": old_logp}
    for name, values in fields.items():
        if values is not None and (bad := np.argwhere(np.asarray(batch.response_mask)
                                                      & ~np.isfinite(values))).size:
            m, r, t = map(int, bad[0])
            return (f"{name} of the batch is not finite at {len(bad)} tokens, "
                    f"first at micro-batch {m}, row {r}, token {t}")
    if bad := bad_tensors(params, model):
        return f"weights are not finite: {', '.join(map(str, bad[:NAMED]))}"
    if LORA in params["layers"]:
        return "the batch and the adapters are finite; the forward pass, the loss or the backward pass is not"
    weights = unquantized_policy(params, precision)
    for m in range(len(batch.tokens)):
        micro = jax.tree.map(lambda x, m=m: x[m], batch)
        seen, logp = fetch(_count_bad_activations(weights, micro, model, precision, temperature))
        if where := _first_bad_activation(seen, logp, model.sparse_layers):
            return f"micro-batch {m}, {where}"
    return "the batch, the weights and the forward pass are finite; the loss or the backward pass is not"


_SEEN = {  # in the order in which a layer computes them
    "q_proj": "the input of self_attn.q_proj, k_proj and v_proj",
    "key": "the key array",
    "value": "the value array",
    "o_proj": "the input of self_attn.o_proj",
    "gate_proj": "the input of mlp.gate_proj and up_proj",
    "down_proj": "the input of mlp.down_proj",
    "output": "the layer's output",
}


@functools.partial(rounding_exact_jit, static_argnums=(2, 3, 4))
def _count_bad_activations(weights: Params, micro: TrainBatch, model: ModelConfig, precision: Precision,
                           temperature: float):
    """The number of tokens with a non-finite value: ({array: [L]} for each layer, a scalar for the
    log-probabilities)."""

    def look(name: str, x: Array, live: Array) -> Array:
        return jnp.sum(live & ~jnp.isfinite(x).reshape(*live.shape, -1).all(-1))

    hidden, seen = forward_with_hooks(weights, micro, model, precision, look)
    logp, _ = token_logprobs(hidden, head_weight(weights, model), micro.tokens, temperature,
                             softcap=model.final_logit_softcapping)
    return seen, jnp.sum(micro.response_mask & ~jnp.isfinite(logp))


_SEEN_SPARSE = _SEEN | {"gate_proj": "the input of the mixture of experts",
                        "down_proj": "the output of the mixture of experts"}


def _first_bad_activation(seen: dict[str, np.ndarray], logp: np.ndarray,
                          sparse: tuple[bool, ...]) -> str | None:
    for layer in range(len(seen["output"])):
        for name, words in (_SEEN_SPARSE if sparse[layer] else _SEEN).items():
            if count := int(seen[name][layer]):
                return f"layer {layer}: {words} is not finite at {count} tokens"
    return f"all layers are finite, but the log-probabilities of {int(logp)} tokens are not" if logp else None

