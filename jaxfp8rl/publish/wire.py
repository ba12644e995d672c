"""The learner's policy as a WeightSource in checkpoint layout, and its inverse for the embedded engine.

Weights that the policy holds quantised are sent unchanged, so that the engine gets the learner's own bytes.
Weights that only the engine holds in FP8 (recipe fp8_rollout) are quantised here, from the policy's rounded
weights.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.api import Constant, Cut, ParamMeta, Rows, StackRow
from jaxfp8rl.distributed.mesh import whole
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, is_packed, param_table
from jaxfp8rl.models.packed import parts_of
from jaxfp8rl.precision.adapters import MergedWeight
from jaxfp8rl.precision.four_bits import FourBits
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.kv_scales import NAMES
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.precision.weights import QuantizedWeight
from jaxfp8rl.publish import shards
from jaxfp8rl.types import Params
from pallas_kernels.four_bits import GROUPS, values
from pallas_kernels.quantize.reference import BLOCK

SCALE_SUFFIX = "_scale_inv"
# of a FourBits' fields
PACKED_SUFFIXES = {"packed": "_packed", "scale": "_scale", "global_scale": "_global_scale"}


def is_fp8(entry: Entry, runs: tuple[LayerRun, ...]) -> bool:
    """Whether the engine holds this tensor as E4M3 codes and block scales."""
    if entry.role.kind != "linear" or entry.layer is None:
        return False
    return any(run.start <= entry.layer < run.stop and entry.path[-2] in run.fp8 for run in runs)


def high_precision_modules(cfg: ModelConfig, runs: tuple[LayerRun, ...]) -> list[str]:
    """HF names of the linears and routers that stay unquantised, for the exclusions of a quantisation
    config."""
    products = [e for e in param_table(cfg) if e.role.kind in ("linear", "router")]
    return [e.hf_name.removesuffix(".weight") for e in products if not is_fp8(e, runs)]


@functools.cache
def wire_manifest(
    cfg: ModelConfig, runs: tuple[LayerRun, ...], weight_dtype: str, kv_scales: bool = False
) -> tuple[ParamMeta, ...]:
    """The tensors of a publish, in HF order.

    Each E4M3 weight is followed by its float32 scales, and one in four bits is its packed codes, their scales
    and NVFP4's divisor (jaxfp8rl.models.packed), a tensor each; every other weight is in `weight_dtype`. With
    `kv_scales`, the scales of FP8 attention come last, under vLLM's names.
    """
    metas: list[ParamMeta] = []
    for e in param_table(cfg):
        if is_packed(e, cfg):
            metas += _packed_metas(e, cfg)
        elif is_fp8(e, runs):
            scale_shape = tuple(-(-n // BLOCK) for n in e.shape)
            metas.append(ParamMeta(e.hf_name, "float8_e4m3fn", e.shape, "weight", (BLOCK, BLOCK)))
            metas.append(ParamMeta(e.hf_name + SCALE_SUFFIX, "float32", scale_shape, "block_scale",
                                   (BLOCK, BLOCK)))
        else:
            metas.append(ParamMeta(e.hf_name, weight_dtype, e.shape))
    if kv_scales:
        metas += [ParamMeta(name, "float32", (), "kv_scale") for name, _, _ in kv_scale_names(cfg)]
    return tuple(metas)


def _packed_metas(e: Entry, cfg: ModelConfig) -> list[ParamMeta]:
    """The tensors of a weight in four bits, as a FourBits has them."""
    assert cfg.packed
    n, k = e.shape
    shapes = {"packed": ("uint8", (n, k // 2)), "global_scale": ("float32", ())}
    return [ParamMeta(e.hf_name + PACKED_SUFFIXES[part.field],
                      *shapes.get(part.field, (part.dtype, part.shape)))
            for part in parts_of(e, cfg.packed.form) if part.field]


def _names(e: Entry, fp8: bool, packed: bool) -> tuple[str, ...]:
    """The names of an entry's tensors on the wire; of a weight in four bits, which may have no divisor,
    all."""
    if packed:
        return tuple(e.hf_name + suffix for suffix in PACKED_SUFFIXES.values())
    return (e.hf_name, e.hf_name + SCALE_SUFFIX) if fp8 else (e.hf_name,)


def kv_scale_names(cfg: ModelConfig) -> Iterator[tuple[str, str, int]]:
    """(name on the wire, "q" or "k" or "v", layer) of every scale of FP8 attention."""
    for layer in range(cfg.num_hidden_layers):
        for which in NAMES:
            yield f"model.layers.{layer}.self_attn.attn.{which}_scale", which, layer


class LearnerWeights:
    """StackSource, PackedSource and ShardSource over a policy (jaxfp8rl.policy.policy), or over masters,
    which give the same tensors.

    Tensors that the policy already holds in wire format are passed without a copy. The others are computed
    asynchronously when they are requested, and freed as soon as the caller drops them. `runs`: the linears
    that the engine computes in FP8. `whole` moves a leaf to one device, where an engine can read it. `lent`:
    the policy's own tensors are Constant, because the caller has the engine drop them before they change.
    """

    def __init__(
        self, cfg: ModelConfig, policy: Params, runs: tuple[LayerRun, ...], weight_dtype: str,
        whole: Callable[[Array], Array] = whole, lent: bool = False,
    ):
        self._args, self._policy, self._whole = (cfg, runs, weight_dtype), policy, whole
        self._lent = lent

    def manifest(self) -> tuple[ParamMeta, ...]:
        return wire_manifest(*self._args, "kv_scales" in self._policy)

    def __iter__(self) -> Iterator[tuple[str, Array | StackRow | Constant]]:
        policy = jax.tree.map(self._whole, self._policy)
        for layer, entries, fp8 in _by_layer(*self._args[:2]):
            for name, buffer, own in self._of_layer(policy, layer, entries, fp8):
                yield name, Constant(buffer) if own and self._lent else buffer
        yield from self._kv_scales(self._policy)

    def _of_layer(self, policy: Params, layer: int | None, entries: list[Entry],
                  fp8: frozenset[Path]) -> Iterator[tuple[str, Array | StackRow, bool]]:
        """Tensors of one layer, of arrays on one device; whether each is the policy's own."""
        dtype, places = self._args[2], _places(self._args[0], _layers_of(policy))
        rows = {e.path: places[layer, e.path].row for e in entries}
        leaves = {path: _at(policy, places[layer, path].path) for path in rows}
        absent = {path: leaf for path, leaf in leaves.items()
                  if not _in_wire_format(leaf, path in fp8, dtype)}
        made = _made_layer(absent, {path: _on_device(rows[path]) for path in absent}, dtype,
                           fp8) if absent else {}
        for e in entries:
            row, own = rows[e.path], e.path not in absent
            if own:
                tensor = _row(leaves[e.path], () if row is None else (row, *e.index[1:]))
            else:
                tensor = _row(made[e.path], e.index[1:]) if e.index[1:] else made.pop(e.path)
            yield from zip(_names(e, e.path in fp8, is_packed(e, self._args[0])),
                           tensor if isinstance(tensor, tuple) else (tensor,), itertools.repeat(own))

    def decoded(self, name: str, start: int, stop: int) -> Array:
        """See PackedSource."""
        e, places = _packed_entries(self._args[0])[name], _places(self._args[0], _layers_of(self._policy))
        path, row = places[e.layer, e.path]
        return _columns(jax.tree.map(self._whole, _at(self._policy, path)), _on_device(row),
                        _on_device(start), stop - start)

    def _kv_scales(self, policy: Params) -> Iterator[tuple[str, StackRow]]:
        if scales := policy.get("kv_scales"):
            for name, which, layer in kv_scale_names(self._args[0]):
                yield name, StackRow(scales[which], layer)

    def held(self) -> tuple[tuple[tuple[int, Cut], ...], ...]:
        """See ShardSource: the boxes of all devices, of all processes."""
        return shards.by_process(_spreads(*self._args, *shards.shapes_of(self._policy)))

    @property
    def lasting(self) -> bool:
        """See ShardSource: whether the policy holds every tensor in wire format."""
        cfg, runs, dtype = self._args
        return all(_in_wire_format(_at(self._policy, span.path), span.fp8, dtype)
                   for span in _spans(cfg, runs, _layers_of(self._policy)))

    def boxes(self, wanted: Sequence[Sequence[Cut]]) -> Iterator[list[Array | StackRow]]:
        """See ShardSource. A layer is made at a time, by each device of its own part."""
        trees = shards.local_trees(self._policy)
        spreads = _spreads(*self._args, *shards.shapes_of(self._policy))
        asked = iter([shards.holders(spread, boxes) for spread, boxes in zip(spreads, wanted, strict=True)])
        for layer, entries, fp8 in _by_layer(*self._args[:2]):
            of = [(e, [next(asked) for _ in range(1 + (e.path in fp8))]) for e in entries]
            used = {device for _, tensors in of for devices in tensors for device in devices}
            made = {d: {name: buffer for name, buffer, _ in
                        self._of_layer(trees[d], layer, self._on(d, layer, entries), fp8)} for d in used}
            for e, tensors in of:
                for name, devices in zip((e.hf_name, e.hf_name + SCALE_SUFFIX), tensors):
                    yield [made[device][name] for device in devices]
            del made  # before the next layer is computed
        scales = {d: dict(self._kv_scales(tree)) for d, tree in trees.items()}
        for (name, *_), devices in zip(kv_scale_names(self._args[0]), asked):
            yield [scales[device][name] for device in devices]

    def _on(self, device: shards.Device, layer: int | None, entries: list[Entry]) -> list[Entry]:
        """The entries that a device holds, or holds a box of, with the expert's number there."""
        places, found = _places(self._args[0], _layers_of(self._policy)), []
        held = {path: shards.experts(_at(self._policy, places[layer, path].path), device)
                for path in {e.path for e in entries if len(e.index) > 1}}
        for e in entries:
            if e.path not in held:
                found.append(e)
            elif e.index[1] in held[e.path]:
                found.append(e._replace(index=(e.index[0], held[e.path].index(e.index[1]))))
        return found

    def stacks(self, nbytes: int) -> Iterator[list[Rows]]:
        """The same tensors by whole stacks, as in `StackSource`."""
        cfg, runs, dtype = self._args
        for span in _spans(cfg, runs, _layers_of(self._policy)):
            leaf = _at(self._policy, span.path)
            whole = jax.tree.map(self._whole, leaf)
            if _in_wire_format(leaf, span.fp8, dtype):
                first = span.first and span.first * span.experts
                yield _rows(span.names, whole, first, held=not _is_split(leaf))
            elif span.first is None:
                yield _rows(span.names, _made(whole, None, 1, dtype, False), None, held=False)
            else:
                for at, names in _parts(span, leaf.shape, 1 if span.fp8 else jnp.dtype(dtype).itemsize,
                                        nbytes):
                    # not bound to a name, so that each part is freed before the next is computed
                    count = len(names) // span.experts
                    yield _rows(names, _made(whole, _on_device(at), count, dtype, span.fp8), 0, held=False)
            del whole  # sharded leaves are gathered one at a time
        if scales := self._policy.get("kv_scales"):
            names = {which: tuple(n for n, w, _ in kv_scale_names(cfg) if w == which) for which in scales}
            yield [Rows(names[which], scale, 0, True) for which, scale in scales.items()]


@functools.cache
def _spreads(cfg: ModelConfig, runs: tuple[LayerRun, ...], dtype: str, tree: Any,
             leaves: tuple[Any, ...]) -> tuple[shards.Spread, ...]:
    """By tensor of the manifest: the box of each device. Equal ones are one object."""
    policy, found, seen = tree.unflatten(leaves), [], {}
    places = _places(cfg, _layers_of(policy))
    for layer, entries, fp8 in _by_layer(cfg, runs):
        for e in entries:
            path, row = places[layer, e.path]
            if (key := (path, e.index[1:], e.path in fp8)) not in seen:  # no axis of layers is divided
                at = () if row is None else (row, *e.index[1:])
                seen[key] = shards.of_tensors(e.hf_name, _at(policy, path), at, e.path in fp8)
            found += seen[key]
    if scales := policy.get("kv_scales"):
        found += [shards.of_row(scales[which], (layer,)) for _, which, layer in kv_scale_names(cfg)]
    return tuple(found)


def _is_split(leaf: Array | QuantizedWeight) -> bool:
    """Whether a leaf is sharded over several devices (jaxfp8rl.distributed.mesh)."""
    return len(jax.tree.leaves(leaf)[0].sharding.device_set) > 1


def _in_wire_format(leaf: Array | QuantizedWeight | FourBits, fp8: bool, dtype: str) -> bool:
    """Whether a leaf can be sent as it is."""
    if isinstance(leaf, FourBits):
        return True
    return fp8 if isinstance(leaf, QuantizedWeight) else not fp8 and leaf.dtype == dtype


def _rows(names: tuple[str, ...], stack: Array | QuantizedWeight, first: int | None,
          held: bool) -> list[Rows]:
    if not isinstance(stack, QuantizedWeight):
        return [Rows(names, stack, first, held)]
    return [Rows(names, stack.codes, first, held), Rows(_scales_of(names), stack.scale, first, held)]


@functools.cache
def _packed_entries(cfg: ModelConfig) -> dict[str, Entry]:
    return {e.hf_name: e for e in param_table(cfg) if is_packed(e, cfg)}


@functools.partial(jax.jit, static_argnums=3)
def _columns(stack: FourBits, row: Array, start: Array, count: int) -> Array:
    """`count` columns of a row of weights [L, N, K], from `start` on, which groups divide: [N, count]."""
    cut = lambda x, each: jax.lax.dynamic_slice_in_dim(x[row], start // each, count // each, 1)
    group = GROUPS[stack.format]
    whole = None if stack.global_scale is None else stack.global_scale[row]
    return values(FourBits(cut(stack.packed, 2), cut(stack.scale, group), whole))


@functools.cache
def _scales_of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name + SCALE_SUFFIX for name in names)


@functools.cache
def _parts(span: Span, shape: tuple[int, ...], itemsize: int,
           nbytes: int) -> list[tuple[int, tuple[str, ...]]]:
    """(first row, names) of parts of up to `nbytes`, of equal size where possible, so that they share a
    compiled program."""
    each, row_bytes = span.experts, math.prod(shape[1:]) * itemsize
    rows = len(span.names) // each
    size = -(-rows // -(-rows // max(nbytes // row_bytes, 1)))
    first = span.first or 0
    return [(first + i, span.names[i * each : (i + size) * each]) for i in range(0, rows, size)]


Path = tuple[str, ...]


@functools.cache
def _by_layer(cfg: ModelConfig,
              runs: tuple[LayerRun, ...]) -> list[tuple[int | None, list[Entry], frozenset[Path]]]:
    """The table of tensors in wire order: (layer or None, its entries, the paths of its FP8 tensors)."""
    groups = ((layer, list(entries))
              for layer, entries in itertools.groupby(param_table(cfg), key=lambda e: e.layer))
    return [(layer, entries, frozenset(e.path for e in entries if is_fp8(e, runs)))
            for layer, entries in groups]


class Place(NamedTuple):
    """The path of a leaf of the policy, and a layer's row in it; None for a leaf outside the layers."""

    path: tuple[str | int, ...]
    row: int | None


@functools.cache
def _places(cfg: ModelConfig, held: tuple[int, ...]) -> dict[tuple[int | None, Path], Place]:
    """(layer or None, path) -> its Place in a policy whose stacks have `held` layers each.

    A leaf has a row for each layer of its stack that has such a tensor.
    """
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
    """The number of layers in each stack, read off the norms, which every layer has."""
    return tuple(stack["input_layernorm"]["weight"].shape[0] for stack in policy["layers"])


class Span(NamedTuple):
    """Tensors with one format: rows of a leaf from `first` on, or, if `first` is None, a leaf outside the
    layers. Each row holds `experts` tensors."""

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
    """The tensor at `index` (layer) or (layer, expert) of a stack, without a copy."""
    if not index:
        return leaf
    at = index[0] if len(index) == 1 else index
    row = lambda stack: StackRow(stack, at)
    if isinstance(leaf, QuantizedWeight | FourBits):
        return tuple(row(stack) for stack in leaf if stack is not None)
    return row(leaf)


@functools.cache
def _on_device(index: int | None) -> Array | None:
    """`index` as a device array, cached for all publishes because each number from the host costs a
    transfer."""
    return None if index is None else jnp.int32(index)


@functools.partial(rounding_exact_jit, static_argnums=(2, 3))
def _made_layer(
    leaves: dict[Path, Array], rows: dict[Path, Array | None], dtype: str, fp8: frozenset[Path]
) -> dict[Path, Any]:
    """One layer's tensors in wire format: its row of each leaf, or the whole leaf if its row is None. All
    layers of a kind in a stack share one compiled program."""

    def one(path: Path) -> Array | QuantizedWeight:
        if (row := rows[path]) is None:
            return _rounded(leaves[path], dtype)
        return jax.tree.map(lambda x: x[0], _rows_made(leaves[path], row, 1, dtype, path in fp8))

    return {path: one(path) for path in leaves}


@functools.partial(rounding_exact_jit, static_argnums=(2, 3, 4))
def _made(leaf: Array, first: Array | None, count: int, dtype: str, fp8: bool) -> Array | QuantizedWeight:
    """`count` rows of `leaf` from `first` on, in wire format, or the whole leaf if `first` is None. `first`
    is traced, so that all parts of a stack share a compiled program."""
    return _rounded(leaf, dtype) if first is None else _rows_made(leaf, first, count, dtype, fp8)


def _rows_made(leaf: Array, first: Array, count: int, dtype: str, fp8: bool) -> Array | QuantizedWeight:
    """Rows of `leaf`, rounded to `dtype`, then quantised or cast to it."""
    if isinstance(leaf, MergedWeight):
        return leaf.rows(first, count).made(dtype, fp8)
    if fp8 and leaf.dtype == dtype:
        return QuantizedWeight.of(leaf, (first, count))
    rounded = _rounded(jax.lax.dynamic_slice_in_dim(leaf, first, count), dtype)
    return QuantizedWeight.of(rounded) if fp8 else rounded


def _rounded(x: Array, dtype: str) -> Array:
    return round_to(x, dtype).astype(dtype)


def assemble(cfg: ModelConfig, runs: tuple[LayerRun, ...], tensors: Mapping[str, Array]) -> Params:
    """Wire tensors -> the parameter tree of the model's functions, with one stack of layers a run.

    FP8 weights become QuantizedWeight leaves with the codes and scales that were sent, and those in four bits
    FourBits. A tensor may be a StackRow: rows that are a whole stack become that stack, without a copy.
    """

    def leaf(e: Entry) -> Any:
        if is_packed(e, cfg):
            found: Any = [tensors.get(name) for name in _names(e, False, True)]
            return FourBits(*found)
        if is_fp8(e, runs):
            return QuantizedWeight(tensors[e.hf_name], tensors[e.hf_name + SCALE_SUFFIX])
        return tensors[e.hf_name]

    table = param_table(cfg)
    params: Params = {}
    for e in table:
        if e.layer is None:
            _put(params, e.path, jnp.asarray(leaf(e)))
    stacks = []
    for run in runs:
        stack: Params = {}
        for path in dict.fromkeys(e.path for e in table if e.layer is not None):
            members = [e for e in table if e.path == path and e.layer in range(run.start, run.stop)]
            if not members:  # a run of dense layers has no experts, and one of sparse layers no dense MLP
                continue
            experts = (cfg.mixture.num_experts,) if len(members[0].index) > 1 else ()
            join = functools.partial(_stack_of, experts)
            _put(stack, path[1:], jax.tree.map(join, *map(leaf, members)))
        stacks.append(stack)
    scales: dict[str, list] = {}
    for name, which, _ in kv_scale_names(cfg):
        if name in tensors:
            scales.setdefault(which, []).append(tensors[name])
    stacked = {"kv_scales": {which: jnp.stack(xs) for which, xs in scales.items()}} if scales else {}
    return {**params, "layers": tuple(stacks)} | stacked


def _stack_of(experts: tuple[int, ...], *rows: Any) -> Array:
    """The stack [L, *experts, ...] of the tensors of a leaf, in order."""
    first = rows[0]
    if isinstance(first, StackRow):
        axes = len(np.atleast_1d(first.index))
        whole = [tuple(np.atleast_1d(row.index))
                 for row in rows] == list(np.ndindex(*first.stack.shape[:axes]))
        if whole and all(row.stack is first.stack for row in rows):
            return first.stack
        rows = tuple(row.stack[row.index] for row in rows)
    return jnp.stack(rows).reshape(-1, *experts, *rows[0].shape)


def _put(tree: Params, path: tuple[str, ...], value: Array | QuantizedWeight) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
