"""The policy on the wire: the learner as a WeightSource in checkpoint layout, and the way back for the
embedded engine.

What is quantised in the policy leaves as it is: these bytes are the learner's own. What the engine alone
holds in FP8 (recipe fp8_rollout) is quantised here, from the policy's rounded weights.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bridges.api import ParamMeta, Rows, StackRow
from jaxfp8rl.distributed.mesh import whole
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, param_table
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.kv_scales import NAMES
from jaxfp8rl.precision.linear import QuantizedWeight, round_to
from jaxfp8rl.precision.recipe import LayerRun
from jaxfp8rl.types import Params
from pallas_kernels.quantize.reference import BLOCK

SCALE_SUFFIX = "_scale_inv"


def is_fp8(entry: Entry, runs: tuple[LayerRun, ...]) -> bool:
    """Whether the engine holds this tensor as E4M3 codes and block scales."""
    if entry.role.kind != "linear" or entry.layer is None:
        return False
    return any(run.start <= entry.layer < run.stop and entry.path[-2] in run.fp8 for run in runs)


def high_precision_modules(cfg: ModelConfig, runs: tuple[LayerRun, ...]) -> list[str]:
    """HF names of the linears and routers that stay unquantised: what a quantisation config has to leave
    out."""
    products = [e for e in param_table(cfg) if e.role.kind in ("linear", "router")]
    return [e.hf_name.removesuffix(".weight") for e in products if not is_fp8(e, runs)]


@functools.cache
def wire_manifest(
    cfg: ModelConfig, runs: tuple[LayerRun, ...], weight_dtype: str, kv_scales: bool = False
) -> tuple[ParamMeta, ...]:
    """What crosses, in HF order: E4M3 weights each followed by their float32 scales, everything else in
    `weight_dtype`; at the end, if `kv_scales`, those of FP8 attention under vLLM's names."""
    metas: list[ParamMeta] = []
    for e in param_table(cfg):
        if is_fp8(e, runs):
            scale_shape = tuple(-(-n // BLOCK) for n in e.shape)
            metas.append(ParamMeta(e.hf_name, "float8_e4m3fn", e.shape, "weight", (BLOCK, BLOCK)))
            metas.append(ParamMeta(e.hf_name + SCALE_SUFFIX, "float32", scale_shape, "block_scale",
                                   (BLOCK, BLOCK)))
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
    """StackSource over a policy (jaxfp8rl.policy.policy), or over masters, of which the same is made. `runs`:
    which linears the engine computes in FP8.

    What the policy holds as it crosses is given out where it lies. The rest is computed when it is asked for
    and not waited for, and no more of it than what the caller keeps lives at once. `whole` puts a leaf on one
    device, where an engine can read it.
    """

    def __init__(
        self, cfg: ModelConfig, policy: Params, runs: tuple[LayerRun, ...], weight_dtype: str,
        whole: Callable[[Array], Array] = whole,
    ):
        self._args, self._policy, self._whole = (cfg, runs, weight_dtype), policy, whole

    def manifest(self) -> tuple[ParamMeta, ...]:
        return wire_manifest(*self._args, "kv_scales" in self._policy)

    def __iter__(self) -> Iterator[tuple[str, Array | StackRow]]:
        (cfg, runs, dtype), policy = self._args, jax.tree.map(self._whole, self._policy)
        places = _places(cfg, _layers_of(policy))
        for layer, entries, fp8 in _by_layer(cfg, runs):
            rows = {e.path: places[layer, e.path].row for e in entries}
            leaves = {path: _at(policy, places[layer, path].path) for path in rows}
            absent = {path: leaf for path, leaf in leaves.items() if not _crosses(leaf, path in fp8, dtype)}
            made = {}  # what was made of the last layer goes before this one's is made
            made |= _made_layer(absent, {path: _on_device(rows[path]) for path in absent}, dtype,
                                fp8) if absent else {}
            for e in entries:
                row = rows[e.path]
                if e.path in made:
                    tensor = _row(made[e.path], e.index[1:]) if e.index[1:] else made.pop(e.path)
                else:
                    tensor = _row(leaves[e.path], () if row is None else (row, *e.index[1:]))
                yield from zip((e.hf_name, e.hf_name + SCALE_SUFFIX), tensor if e.path in fp8 else (tensor,))
        if scales := self._policy.get("kv_scales"):
            for name, which, layer in kv_scale_names(cfg):
                yield name, StackRow(scales[which], layer)

    def stacks(self, nbytes: int) -> Iterator[list[Rows]]:
        """The same by whole stacks, as `StackSource` says."""
        cfg, runs, dtype = self._args
        for span in _spans(cfg, runs, _layers_of(self._policy)):
            leaf = _at(self._policy, span.path)
            whole = jax.tree.map(self._whole, leaf)
            if _crosses(leaf, span.fp8, dtype):
                first = span.first and span.first * span.experts
                yield _rows(span.names, whole, first, held=not _is_split(leaf))
            elif span.first is None:
                yield _rows(span.names, _made(whole, None, 1, dtype, False), None, held=False)
            else:
                for at, names in _parts(span, leaf.shape, 1 if span.fp8 else jnp.dtype(dtype).itemsize,
                                        nbytes):
                    # no name for what is made: nothing is left of it when the next is
                    count = len(names) // span.experts
                    yield _rows(names, _made(whole, _on_device(at), count, dtype, span.fp8), 0, held=False)
            del whole  # what lay over several devices is gathered one leaf at a time
        if scales := self._policy.get("kv_scales"):
            names = {which: tuple(n for n, w, _ in kv_scale_names(cfg) if w == which) for which in scales}
            yield [Rows(names[which], scale, 0, True) for which, scale in scales.items()]


def _is_split(leaf: Array | QuantizedWeight) -> bool:
    """Whether it lies over several devices (jaxfp8rl.distributed.mesh)."""
    return len(jax.tree.leaves(leaf)[0].sharding.device_set) > 1


def _crosses(leaf: Array | QuantizedWeight, fp8: bool, dtype: str) -> bool:
    """Whether a leaf is as it crosses."""
    return fp8 if isinstance(leaf, QuantizedWeight) else not fp8 and leaf.dtype == dtype


def _rows(names: tuple[str, ...], stack: Array | QuantizedWeight, first: int | None,
          held: bool) -> list[Rows]:
    if not isinstance(stack, QuantizedWeight):
        return [Rows(names, stack, first, held)]
    return [Rows(names, stack.codes, first, held), Rows(_scales_of(names), stack.scale, first, held)]


@functools.cache
def _scales_of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name + SCALE_SUFFIX for name in names)


@functools.cache
def _parts(span: Span, shape: tuple[int, ...], itemsize: int,
           nbytes: int) -> list[tuple[int, tuple[str, ...]]]:
    """(first row, names) of parts of up to `nbytes`, as equal as can be, for all but one to share a
    program."""
    each, row_bytes = span.experts, math.prod(shape[1:]) * itemsize
    rows = len(span.names) // each
    size = -(-rows // -(-rows // max(nbytes // row_bytes, 1)))
    first = span.first or 0
    return [(first + i, span.names[i * each : (i + size) * each]) for i in range(0, rows, size)]


Path = tuple[str, ...]


@functools.cache
def _by_layer(cfg: ModelConfig,
              runs: tuple[LayerRun, ...]) -> list[tuple[int | None, list[Entry], frozenset[Path]]]:
    """The table of tensors in wire order as (layer or None, its entries, paths of what crosses in FP8)."""
    groups = ((layer, list(entries))
              for layer, entries in itertools.groupby(param_table(cfg), key=lambda e: e.layer))
    return [(layer, entries, frozenset(e.path for e in entries if is_fp8(e, runs)))
            for layer, entries in groups]


class Place(NamedTuple):
    """A leaf of the policy, and the row of it that is a layer's; None of one outside the layers."""

    path: tuple[str | int, ...]
    row: int | None


@functools.cache
def _places(cfg: ModelConfig, held: tuple[int, ...]) -> dict[tuple[int | None, Path], Place]:
    """(layer or None, path) -> where it is, of `held` layers in each stack. A leaf has rows for those layers
    of its stack that have such a tensor."""
    stack_of = [stack for stack, count in enumerate(held) for _ in range(count)]
    places, first = {}, {}
    for e in param_table(cfg):
        if e.layer is None:
            places[None, e.path] = Place(e.path, None)
        else:
            path = ("layers", stack_of[e.layer], *e.path[1:])
            places[e.layer, e.path] = Place(path, e.index[0] - first.setdefault(path, e.index[0]))
    return places


def _layers_of(policy: Params) -> tuple[int, ...]:
    """How many layers each stack holds. Every layer has norms."""
    return tuple(len(stack["input_layernorm"]["weight"]) for stack in policy["layers"])


class Span(NamedTuple):
    """Tensors that cross alike: rows of a leaf from `first` on, or if that is None a leaf outside the layers.
    Of each row there are `experts` tensors."""

    names: tuple[str, ...]
    path: tuple[str | int, ...]
    first: int | None
    fp8: bool
    experts: int = 1


@functools.cache
def _spans(cfg: ModelConfig, runs: tuple[LayerRun, ...], held: tuple[int, ...]) -> list[Span]:
    """The table of tensors, stack by stack and leaf by leaf; `held`: layers of each stack."""
    places = _places(cfg, held)

    def alike(e: Entry) -> tuple:
        return places[e.layer, e.path].path, is_fp8(e, runs)

    def span(entries: list[Entry]) -> Span:
        e, names = entries[0], tuple(e.hf_name for e in entries)
        experts = cfg.mixture.num_experts if len(e.index) > 1 else 1
        return Span(names, *places[e.layer, e.path], is_fp8(e, runs), experts)

    by_leaf = sorted(param_table(cfg), key=lambda e: (e.path, -1 if e.layer is None else e.layer))
    return [span(list(entries)) for _, entries in itertools.groupby(by_leaf, alike)]


def _at(tree: Params, path: tuple[str | int, ...]) -> Any:
    return functools.reduce(operator.getitem, path, tree)


def _row(leaf: Array | QuantizedWeight, index: tuple[int, ...]) -> Any:
    """What is at `index`, of a layer or of a layer and an expert, without a copy."""
    if not index:
        return leaf
    at = index[0] if len(index) == 1 else index
    row = lambda stack: StackRow(stack, at)
    return tuple(map(row, leaf)) if isinstance(leaf, QuantizedWeight) else row(leaf)


@functools.cache
def _on_device(index: int | None) -> Array | None:
    """Once for all publishes: a number from the host is a transfer each time."""
    return None if index is None else jnp.int32(index)


@functools.partial(rounding_exact_jit, static_argnums=(2, 3))
def _made_layer(
    leaves: dict[Path, Array], rows: dict[Path, Array | None], dtype: str, fp8: frozenset[Path]
) -> dict[Path, Any]:
    """Its row of each leaf, or if that is None the leaf itself, by one program for all layers of a kind in a
    stack."""

    def one(path: Path) -> Array | QuantizedWeight:
        if (row := rows[path]) is None:
            return _rounded(leaves[path], dtype)
        return jax.tree.map(lambda x: x[0], _rows_made(leaves[path], row, 1, dtype, path in fp8))

    return {path: one(path) for path in leaves}


@functools.partial(rounding_exact_jit, static_argnums=(2, 3, 4))
def _made(leaf: Array, first: Array | None, count: int, dtype: str, fp8: bool) -> Array | QuantizedWeight:
    """`count` rows of `leaf` from the first on, or if that is None the leaf itself. `first` is traced: all
    parts of a stack share a program."""
    return _rounded(leaf, dtype) if first is None else _rows_made(leaf, first, count, dtype, fp8)


def _rows_made(leaf: Array, first: Array, count: int, dtype: str, fp8: bool) -> Array | QuantizedWeight:
    """Rounded to `dtype`, and quantised or cast to it."""
    if fp8 and leaf.dtype == dtype:
        return QuantizedWeight.of(leaf, (first, count))
    rounded = _rounded(jax.lax.dynamic_slice_in_dim(leaf, first, count), dtype)
    return QuantizedWeight.of(rounded) if fp8 else rounded


def _rounded(x: Array, dtype: str) -> Array:
    return round_to(x, dtype).astype(dtype)


def assemble(cfg: ModelConfig, runs: tuple[LayerRun, ...], tensors: Mapping[str, Array]) -> Params:
    """Wire tensors -> the parameter tree that the model's functions take, one stack of layers a run.

    FP8 weights arrive as QuantizedWeight leaves: their codes and scales are used as they came.
    """

    def leaf(e: Entry) -> Array | QuantizedWeight:
        codes = jnp.asarray(tensors[e.hf_name])
        return QuantizedWeight(codes,
                               jnp.asarray(tensors[e.hf_name + SCALE_SUFFIX])) if is_fp8(e, runs) else codes

    table = param_table(cfg)
    params: Params = {}
    for e in table:
        if e.layer is None:
            _put(params, e.path, leaf(e))
    stacks = []
    for run in runs:
        stack: Params = {}
        for path in dict.fromkeys(e.path for e in table if e.layer is not None):
            members = [e for e in table if e.path == path and e.layer in range(run.start, run.stop)]
            if not members:  # of dense layers alone, or of sparse ones
                continue
            experts = (cfg.mixture.num_experts,) if len(members[0].index) > 1 else ()
            join = lambda *xs, experts=experts: jnp.stack(xs).reshape(-1, *experts, *xs[0].shape)
            _put(stack, path[1:], jax.tree.map(join, *map(leaf, members)))
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
