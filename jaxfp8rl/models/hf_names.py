"""The one table that joins a tensor's Hugging Face name, its place in the parameter tree and its precision role.

Loading, saving and publishing all walk it, so they cannot disagree about names, order or shapes.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxfp8rl.models.config import ModelConfig

ParamRole = Literal["linear", "norm", "embedding", "head"]  # only "linear" is ever quantised


class Entry(NamedTuple):
    """One HF tensor of shape `shape`: `params[path]`, or row `layer` of that stack when it belongs to a layer."""

    hf_name: str
    path: tuple[str, ...]
    layer: int | None
    role: ParamRole
    shape: tuple[int, ...]


@functools.cache
def linear_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """The quantisable products of a layer, "self_attn.q_proj" -> (N, K), in HF order."""
    D, F, d = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    attention = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    mlp = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    return {f"self_attn.{k}": s for k, s in attention.items()} | {f"mlp.{k}": s for k, s in mlp.items()}


@functools.cache
def param_table(cfg: ModelConfig) -> tuple[Entry, ...]:
    """Every tensor of the model in the order of a Hugging Face checkpoint. A tied `lm_head.weight` is not in it."""
    D, d, V = cfg.hidden_size, cfg.head_dim, cfg.vocab_size
    linears = [(module, "linear", shape) for module, shape in linear_shapes(cfg).items()]
    qk_norms = [(f"self_attn.{name}", "norm", (d,)) for name in ("q_norm", "k_norm") if cfg.qk_norm]
    norms = [(name, "norm", (D,)) for name in ("input_layernorm", "post_attention_layernorm")]
    modules = [*linears[:4], *qk_norms, *linears[4:], *norms]  # attention, MLP, norms

    table = [Entry("model.embed_tokens.weight", ("embed_tokens", "weight"), None, "embedding", (V, D))]
    for i in range(cfg.num_hidden_layers):
        for module, role, shape in modules:
            path = ("layers", *module.split("."), "weight")
            table.append(Entry(f"model.layers.{i}.{module}.weight", path, i, role, shape))
    table.append(Entry("model.norm.weight", ("norm", "weight"), None, "norm", (D,)))
    if not cfg.tie_word_embeddings:
        table.append(Entry("lm_head.weight", ("lm_head", "weight"), None, "head", (V, D)))
    return tuple(table)


def get_param(params: dict[str, Any], entry: Entry) -> Any:
    """The entry's own tensor, a QuantizedWeight of its layer where it is one. Layers may be one stack or a tuple of stacks."""
    if entry.layer is None:
        return _at(params, entry.path)
    layer, stacks = entry.layer, params["layers"]
    for stack in stacks if isinstance(stacks, tuple) else (stacks,):
        leaf = _at(stack, entry.path[1:])
        if layer < (held := len(jax.tree.leaves(leaf)[0])):
            return jax.tree.map(operator.itemgetter(layer), leaf)
        layer -= held
    raise KeyError(f"{entry.hf_name}: the tree has {entry.layer - layer} layers")


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)


def set_param(params: dict[str, Any], entry: Entry, value: np.ndarray) -> None:
    """Copy one tensor into its place in a tree of numpy arrays, casting to the tree's dtype."""
    leaf = _at(params, entry.path)
    leaf[... if entry.layer is None else entry.layer] = value


def empty_params(cfg: ModelConfig, dtype: Any) -> dict[str, Any]:
    """A tree of uninitialised numpy arrays, layers stacked, for `set_param` to fill."""
    tree: dict[str, Any] = {}
    for entry in param_table(cfg):
        *nodes, leaf = entry.path
        node = functools.reduce(lambda node, key: node.setdefault(key, {}), nodes, tree)
        stacked = () if entry.layer is None else (cfg.num_hidden_layers,)
        node.setdefault(leaf, None)
        if node[leaf] is None:
            node[leaf] = np.empty((*stacked, *entry.shape), dtype)
    return tree
