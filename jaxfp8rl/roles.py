"""The role of each parameter, in one table: whether FP8 may quantise it, whether it decays, how it is split.

Precision (jaxfp8rl.publish, jaxfp8rl.policy), weight decay (jaxfp8rl.optim) and sharding
(jaxfp8rl.distributed) all look up the name of the module that a weight belongs to. Names are Hugging Face's.
A model with a new module name adds a row.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jax.tree_util import DictKey

# only "linear" is ever quantised
Kind = Literal["linear", "bias", "norm", "embedding", "head", "router", "adapter"]


class Role(NamedTuple):
    """tensor: the axis of a weight [N, K] that is split along the mesh axis "tensor" (Shoeybi et al. 2019,
    section 3): its rows N, its columns K, or neither. fsdp: whether its rows are split along "fsdp". decays:
    whether weight decay applies."""

    kind: Kind
    tensor: Literal["rows", "columns", "neither"]
    fsdp: bool = True
    decays: bool = True


COLUMN_PARALLEL = Role("linear", "rows")  # Megatron's names refer to the transposed weight [K, N]
ROW_PARALLEL = Role("linear", "columns")  # takes the partial results of a column-parallel linear
BIAS = Role("bias", "rows", fsdp=False, decays=False)  # of a column-parallel linear, under the name "bias"
NORM = Role("norm", "neither", fsdp=False, decays=False)
ROUTER = Role("router", "neither")  # every device along "tensor" has it, because every device routes
ADAPTER = Role("adapter", "neither", fsdp=False)  # small: every device has it

ROLES: dict[str, Role] = {
    "embed_tokens": Role("embedding", "rows"),
    "lm_head": Role("head", "rows"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), COLUMN_PARALLEL),
    **dict.fromkeys(("o_proj", "down_proj"), ROW_PARALLEL),
    **dict.fromkeys(("norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm",
                     "pre_feedforward_layernorm", "post_feedforward_layernorm"), NORM),
    "bias": BIAS,
    "gate": ROUTER,
    **dict.fromkeys(("lora_A", "lora_B"), ADAPTER),
}


def role_of(path: tuple[Any, ...]) -> Role:
    """The role of a leaf, from its key path in a tree of parameters, moments, gradients or a policy. A module
    that is not in the table is a column-parallel linear."""
    names = (key.key for key in reversed(path) if isinstance(key, DictKey))
    return next((ROLES[name] for name in names if name in ROLES), COLUMN_PARALLEL)
