"""The one table that joins a tensor's Hugging Face name, its place in the parameter tree and its precision
role.

Loading, saving and publishing all walk it, so they cannot disagree about names, order or shapes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.roles import BIAS, ROLES, Role


class Entry(NamedTuple):
    """One HF tensor of shape `shape`: `params[path]`, or, if it belongs to a layer, what is at `index` of
    that stack: at (row,), an expert's at (row, expert). A stack has a row for each layer that has such a
    tensor."""

    hf_name: str
    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]
    index: tuple[int, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.index is unused

    @property
    def role(self) -> Role:
        module, leaf = self.path[-2:]
        return BIAS if leaf == "bias" else ROLES[module]


def is_packed(entry: Entry, cfg: ModelConfig) -> bool:
    """Whether this weight is in four bits (jaxfp8rl.models.packed)."""
    return bool(cfg.packed) and entry.layer is not None and entry.path[-1] == "weight" and ".".join(
        entry.path[1:3]) in cfg.packed.linears


@functools.cache
def linear_shapes(cfg: ModelConfig) -> dict[str, tuple[int, int]]:
    """The quantisable products of the layers, "self_attn.q_proj" -> (N, K), in HF order;
    "mlp.experts.up_proj" of an expert."""
    D, F, d = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    attention = {"q_proj": (q, D), "k_proj": (kv, D), "v_proj": (kv, D), "o_proj": (D, q)}
    shapes = {f"self_attn.{k}": s for k, s in attention.items()}
    if not all(cfg.sparse_layers):
        shapes |= {f"mlp.{k}": s for k, s in _mlp_shapes(D, F).items()}
    if cfg.experts:
        shapes |= {f"mlp.experts.{k}": s
                   for k, s in _mlp_shapes(D, cfg.mixture.moe_intermediate_size).items()}
    return shapes


def _mlp_shapes(D: int, F: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}


@functools.cache
def param_table(cfg: ModelConfig) -> tuple[Entry, ...]:
    """Every tensor of the model in the order of a Hugging Face checkpoint. A tied `lm_head.weight` is not in
    it."""
    D, V, sparse = cfg.hidden_size, cfg.vocab_size, cfg.sparse_layers
    table = [Entry("model.embed_tokens.weight", ("embed_tokens", "weight"), None, (V, D))]
    for i in range(cfg.num_hidden_layers):
        rank = sparse[:i].count(sparse[i])  # among the layers whose MLP is of this kind
        tensors = [*_attention(cfg, i), *(_mixture(cfg, rank) if sparse[i] else _mlp(cfg, rank)),
                   *_norms(cfg, i)]
        table += [Entry(f"model.layers.{i}.{name}", ("layers", *path), i, shape, index)
                  for name, path, shape, index in tensors]
    table.append(Entry("model.norm.weight", ("norm", "weight"), None, (D,)))
    if not cfg.tie_word_embeddings:
        table.append(Entry("lm_head.weight", ("lm_head", "weight"), None, (V, D)))
    return tuple(table)


# name and path in the layer, shape, index
Tensor = tuple[str, tuple[str, ...], tuple[int, ...], tuple[int, ...]]


def _attention(cfg: ModelConfig, i: int) -> Iterator[Tensor]:
    for module, shape in linear_shapes(cfg).items():
        if not module.startswith("self_attn."):
            continue
        path = tuple(module.split("."))
        yield f"{module}.weight", (*path, "weight"), shape, (i,)
        if cfg.family.qkv_bias and path[1] != "o_proj":
            yield f"{module}.bias", (*path, "bias"), shape[:1], (i,)
    for name in ("q_norm", "k_norm") if cfg.family.qk_norm else ():
        yield f"self_attn.{name}.weight", ("self_attn", name, "weight"), (cfg.head_dim,), (i,)


def _mlp(cfg: ModelConfig, row: int) -> Iterator[Tensor]:
    for name, shape in _mlp_shapes(cfg.hidden_size, cfg.intermediate_size).items():
        yield f"mlp.{name}.weight", ("mlp", name, "weight"), shape, (row,)


def _mixture(cfg: ModelConfig, row: int) -> Iterator[Tensor]:
    """In the tree it is "moe", beside the "mlp" of dense layers, for a stack has rows of one kind."""
    experts, D = cfg.mixture, cfg.hidden_size
    yield "mlp.gate.weight", ("moe", "gate", "weight"), (experts.num_experts, D), (row,)
    for e in range(experts.num_experts):
        for name, shape in _mlp_shapes(D, experts.moe_intermediate_size).items():
            path = "moe", "experts", name, "weight"
            yield f"mlp.experts.{e}.{name}.weight", path, shape, (row, e)


def _norms(cfg: ModelConfig, i: int) -> Iterator[Tensor]:
    for name in cfg.family.norms.names:
        yield f"{name}.weight", (name, "weight"), (cfg.hidden_size,), (i,)


def get_param(params: dict[str, Any], entry: Entry) -> Any:
    """The entry's own tensor, a QuantizedWeight of its layer where it is one. Layers may be one stack or a
    tuple of stacks, of which each has those leaves that its layers have."""
    if entry.layer is None:
        return _at(params, entry.path)
    (row, *expert), stacks = entry.index, params["layers"]
    for stack in stacks if isinstance(stacks, tuple) else (stacks,):
        if entry.path[1] not in stack:
            continue
        leaf = _at(stack, entry.path[1:])
        if row < (held := len(jax.tree.leaves(leaf)[0])):
            return jax.tree.map(operator.itemgetter((row, *expert)), leaf)
        row -= held
    raise KeyError(f"{entry.hf_name}: the tree has {entry.index[0] - row} such layers")


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)


def set_param(params: dict[str, Any], entry: Entry, value: np.ndarray) -> None:
    """Copy one tensor into its place in a tree of numpy arrays, casting to the tree's dtype."""
    _at(params, entry.path)[entry.index] = value


def empty_params(cfg: ModelConfig, dtype: Any) -> dict[str, Any]:
    """A tree of uninitialised numpy arrays, layers stacked, for `set_param` to fill; None in place of weights
    in four bits (jaxfp8rl.models.packed)."""
    tree: dict[str, Any] = {}
    last = {entry.path: entry.index for entry in param_table(cfg)}
    for entry in param_table(cfg):
        *nodes, leaf = entry.path
        node = functools.reduce(lambda node, key: node.setdefault(key, {}), nodes, tree)
        if leaf not in node:
            packed = is_packed(entry, cfg)
            node[leaf] = None if packed else np.empty((*(n + 1 for n in last[entry.path]), *entry.shape),
                                                      dtype)
    return tree
