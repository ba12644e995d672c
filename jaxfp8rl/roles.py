"""What each parameter is, in one table: whether FP8 may take it, whether it decays, how it is split.

Precision (jaxfp8rl.publish, jaxfp8rl.policy), weight decay (jaxfp8rl.optim) and sharding
(jaxfp8rl.distributed) all ask here, by the name of the module that a weight belongs to. Names are Hugging
Face's. A model with a module of another name adds a row.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jax.tree_util import DictKey

Kind = Literal["linear", "norm", "embedding", "head", "router"]  # only "linear" is ever quantised


class Role(NamedTuple):
    """tensor: which axis of a weight [N, K] lies along the mesh axis "tensor" (Shoeybi et al. 2019, section
    3): its rows N, its columns K, or neither. fsdp: whether its rows lie along "fsdp". decays: whether weight
    decay applies."""

    kind: Kind
    tensor: Literal["rows", "columns", "neither"]
    fsdp: bool = True
    decays: bool = True


COLUMN_PARALLEL = Role("linear", "rows")  # Megatron's names speak of the transposed weight [K, N]
ROW_PARALLEL = Role("linear", "columns")  # multiplies the parts that a column-parallel linear leaves
NORM = Role("norm", "neither", fsdp=False, decays=False)
ROUTER = Role("router", "neither")  # all devices along "tensor" have it, for all of them choose

ROLES: dict[str, Role] = {
    "embed_tokens": Role("embedding", "rows"),
    "lm_head": Role("head", "rows"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), COLUMN_PARALLEL),
    **dict.fromkeys(("o_proj", "down_proj"), ROW_PARALLEL),
    **dict.fromkeys(("norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm"), NORM),
    "gate": ROUTER,
}


def role_of(path: tuple[Any, ...]) -> Role:
    """The role of a leaf by its key path in a tree of parameters, moments, gradients or a policy. A module
    that the table does not name is a column-parallel linear."""
    names = (key.key for key in reversed(path) if isinstance(key, DictKey))
    return next((ROLES[name] for name in names if name in ROLES), COLUMN_PARALLEL)
