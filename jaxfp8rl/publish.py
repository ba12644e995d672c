"""The policy on the wire: the learner as a WeightSource in checkpoint layout, and the way back for the embedded engine.

What is quantised in the policy leaves as it is: these bytes are the learner's own. What the engine alone holds in FP8 (recipe
fp8_rollout) is quantised here, from the policy's rounded weights.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from bridges.api import ParamMeta, StackRow
from jaxfp8rl.exact import exact_jit
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, param_table
from jaxfp8rl.precision.kv_scales import NAMES
from jaxfp8rl.precision.linear import QuantizedWeight, round_to
from jaxfp8rl.precision.recipe import LayerRun
from jaxfp8rl.types import Params
from pallas_kernels.quantize.reference import BLOCK

SCALE_SUFFIX = "_scale_inv"


def is_fp8(entry: Entry, runs: tuple[LayerRun, ...]) -> bool:
    """Whether the engine holds this tensor as E4M3 codes and block scales."""
    if entry.role != "linear":
        return False
    return any(run.start <= entry.layer < run.stop and entry.path[-2] in run.fp8 for run in runs)


@functools.cache
def wire_manifest(
    cfg: ModelConfig, runs: tuple[LayerRun, ...], weight_dtype: str, kv_scales: bool = False
) -> tuple[ParamMeta, ...]:
    """What crosses, in HF order: E4M3 weights each followed by their float32 scales, everything else in `weight_dtype`; at the
    end, if `kv_scales`, those of FP8 attention under vLLM's names."""
    metas: list[ParamMeta] = []
    for e in param_table(cfg):
        if is_fp8(e, runs):
            scale_shape = tuple(-(-n // BLOCK) for n in e.shape)
            metas.append(ParamMeta(e.hf_name, "float8_e4m3fn", e.shape, "weight", (BLOCK, BLOCK)))
            metas.append(ParamMeta(e.hf_name + SCALE_SUFFIX, "float32", scale_shape, "block_scale", (BLOCK, BLOCK)))
        else:
            metas.append(ParamMeta(e.hf_name, weight_dtype, e.shape))
    if kv_scales:
        metas += [ParamMeta(name, "float32", (), "kv_scale") for name, _, _ in kv_scale_names(cfg)]
    return tuple(metas)


def kv_scale_names(cfg: ModelConfig) -> Iterator[tuple[str, str, int]]:
    """(name on the wire, "q" or "k" or "v", layer) of every scale of FP8 attention."""
    for layer in range(cfg.num_hidden_layers):
        for which in NAMES:
            yield f"model.layers.{layer}.self_attn.attn.{which}_scale", which, layer


class LearnerWeights:
    """WeightSource over a policy (jaxfp8rl.policy), or over masters, of which the same is made. `runs`: which linears the engine
    computes in FP8.

    What the policy holds as it crosses is given out where it lies. The rest, a layer at a time, is computed when the layer's
    first tensor is asked for and not waited for: whoever asks for the next layer early has both in the making, and no more
    than what he keeps lives at once.
    """

    def __init__(self, cfg: ModelConfig, policy: Params, runs: tuple[LayerRun, ...], weight_dtype: str):
        self._args, self._policy = (cfg, runs, weight_dtype), policy

    def manifest(self) -> tuple[ParamMeta, ...]:
        return wire_manifest(*self._args, "kv_scales" in self._policy)

    def __iter__(self) -> Iterator[tuple[str, Array | StackRow]]:
        cfg, runs, weight_dtype = self._args
        for layer, entries, fp8 in _by_layer(cfg, runs):
            tensors = _layer(self._policy, layer, [e.path for e in entries], fp8, weight_dtype)
            for e in entries:
                tensor = tensors.pop(e.path)
                if e.path in fp8:
                    yield e.hf_name, tensor.codes
                    yield e.hf_name + SCALE_SUFFIX, tensor.scale
                else:
                    yield e.hf_name, tensor
        if scales := self._policy.get("kv_scales"):
            for name, which, layer in kv_scale_names(cfg):
                yield name, StackRow(scales[which], layer)


Path = tuple[str, ...]


@functools.cache
def _by_layer(cfg: ModelConfig, runs: tuple[LayerRun, ...]) -> list[tuple[int | None, list[Entry], set[Path]]]:
    """The table of tensors in wire order as (layer or None, its entries, paths of what crosses in FP8)."""
    groups = ((layer, list(entries)) for layer, entries in itertools.groupby(param_table(cfg), key=lambda e: e.layer))
    return [(layer, entries, {e.path for e in entries if is_fp8(e, runs)}) for layer, entries in groups]


Tensors = dict[Path, Any]


def _layer(policy: Params, layer: int | None, paths: list[Path], fp8: set[Path], dtype: str) -> Tensors:
    """The tensors of one layer (None: of no layer) as they cross, by path: QuantizedWeights where `fp8`."""
    stack, index = (policy, None) if layer is None else _stack_of(policy["layers"], layer)
    leaves = {path: functools.reduce(operator.getitem, path[layer is not None :], stack) for path in paths}
    quantize = {path: w for path, w in leaves.items() if path in fp8 and not isinstance(w, QuantizedWeight)}
    cast = {path: w for path, w in leaves.items() if path not in fp8 and w.dtype != dtype}
    computed = _computed(quantize, cast, _on_device(index), dtype) if quantize or cast else {}
    return {path: computed[path] if path in computed else _row(w, index) for path, w in leaves.items()}


def _row(leaf: Array | QuantizedWeight, index: int | None) -> Any:
    if index is None:
        return leaf
    return QuantizedWeight(*(StackRow(w, index) for w in leaf)) if isinstance(leaf, QuantizedWeight) else StackRow(leaf, index)


def _stack_of(stacks: tuple[Params, ...], layer: int) -> tuple[Params, int]:
    """The stack that holds a layer, and the layer's place in it."""
    for stack in stacks:
        held = len(jax.tree.leaves(stack)[0])
        if layer < held:
            return stack, layer
        layer -= held
    raise KeyError(f"the policy has no layer {layer} beyond its last")


@functools.cache
def _on_device(index: int | None) -> Array | None:
    """Once for all publishes: a number from the host is a transfer each time."""
    return None if index is None else jnp.int32(index)


@functools.partial(exact_jit, static_argnums=3)
def _computed(quantize: Tensors, cast: Tensors, index: Array | None, dtype: str) -> Tensors:
    """Row `index` of the leaves, or the leaves themselves, rounded to `dtype`, and quantised or cast to it. `index` is traced,
    so that all layers of a stack share one program."""

    def row(w: Array) -> Array:
        return round_to(w if index is None else jax.lax.dynamic_index_in_dim(w, index, keepdims=False), dtype)

    codes = {path: QuantizedWeight.of(row(w)) for path, w in quantize.items()}
    return codes | {path: row(w).astype(dtype) for path, w in cast.items()}


def assemble(cfg: ModelConfig, runs: tuple[LayerRun, ...], tensors: Mapping[str, Array]) -> Params:
    """Wire tensors -> the parameter tree that the model's functions take, one stack of layers a run.

    FP8 weights arrive as QuantizedWeight leaves: their codes and scales are used as they came.
    """

    def leaf(e: Entry) -> Array | QuantizedWeight:
        codes = jnp.asarray(tensors[e.hf_name])
        return QuantizedWeight(codes, jnp.asarray(tensors[e.hf_name + SCALE_SUFFIX])) if is_fp8(e, runs) else codes

    table = param_table(cfg)
    params: Params = {}
    for e in table:
        if e.layer is None:
            _put(params, e.path, leaf(e))
    stacks = []
    for run in runs:
        stack: Params = {}
        for path in dict.fromkeys(e.path for e in table if e.layer is not None):
            members = [leaf(e) for e in table if e.path == path and run.start <= e.layer < run.stop]
            _put(stack, path[1:], jax.tree.map(lambda *xs: jnp.stack(xs), *members))
        stacks.append(stack)
    scales: dict[str, list] = {}
    for name, which, _ in kv_scale_names(cfg):
        if name in tensors:
            scales.setdefault(which, []).append(tensors[name])
    stacked = {"kv_scales": {which: jnp.stack(xs) for which, xs in scales.items()}} if scales else {}
    return {**params, "layers": tuple(stacks)} | stacked


def _put(tree: Params, path: tuple[str, ...], value: Array | QuantizedWeight) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
