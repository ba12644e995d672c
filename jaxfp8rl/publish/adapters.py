"""Adapters on the wire, after the tensors of the base: under PEFT's names without its prefix, one tensor a
layer, A [r, K] and, in place of B, s B [N, r], rounded as a product of adapters rounds it."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.api import Constant, ParamMeta, Rows, StackRow
from jaxfp8rl.precision.adapters import LORA, A, B, MergedWeight, merged_policy
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import AdapterProduct
from jaxfp8rl.publish.wire import LearnerWeights, whole
from jaxfp8rl.types import Params


class Adapters(NamedTuple):
    """The shape of a policy's adapters. shapes: "self_attn.q_proj" -> (N, K) of the linears that have one.
    product: the learner's. slots: how many an engine holds at once."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    layers: int
    rank: int
    product: AdapterProduct
    slots: int = 1

    @property
    def in_engine(self) -> AdapterProduct:
        """The product of adapters that were published: their B has the factor."""
        return dataclasses.replace(self.product, scale=1.0, slots=self.slots)

    def names(self) -> Iterator[tuple[str, int, str, str, str, tuple[int, int]]]:
        """(name, layer, part, module, "lora_A" or "lora_B", shape) of every tensor, in order."""
        for layer in range(self.layers):
            for linear, (n, k) in self.shapes:
                part, module = linear.split(".")
                for which, shape in ((A, (self.rank, k)), (B, (n, self.rank))):
                    yield f"model.layers.{layer}.{linear}.{which}.weight", layer, part, module, which, shape

    def manifest(self) -> tuple[ParamMeta, ...]:
        return tuple(ParamMeta(name, self.product.dtype, shape) for name, *_, shape in self.names())

    def assemble(self, runs: tuple[LayerRun, ...], tensors: Mapping[str, Array]) -> Params:
        """Wire tensors -> the adapters' part of an engine's policy, with one stack of layers a run. They are
        in slot 0, and zeros in the others."""
        stacks: dict[tuple[str, str, str], list[Array]] = {}
        for name, _, *path, _ in self.names():
            stacks.setdefault((path[0], path[1], path[2]), []).append(jnp.asarray(tensors[name]))
        layers = []
        for run in runs:
            adapters: Params = {}
            for (part, module, which), rows in stacks.items():
                pair = adapters.setdefault(part, {}).setdefault(module, {})
                stack, axis = jnp.stack(rows[run.start : run.stop]), 1 if which == A else 2
                wide = [(0, (self.slots - 1) * self.rank if i == axis else 0) for i in range(3)]
                pair[which] = jnp.pad(stack, wide)
            layers.append({LORA: adapters})
        return {"layers": tuple(layers)}

    def in_slot(self, policy: Params, slot: int, tensors: Mapping[str, Array] | None) -> Params:
        """An engine's policy with the adapters of these wire tensors, or zeros, in `slot`."""
        firsts = list(itertools.accumulate((_layers(stack[LORA]) for stack in policy["layers"]), initial=0))
        layers = []
        for first, stack in zip(firsts, policy["layers"]):
            new: Params = {}
            for linear, _ in self.shapes:
                part, module = linear.split(".")
                pair = stack[LORA][part][module]
                rows = {which: [tensors[f"model.layers.{first + i}.{linear}.{which}.weight"]
                                for i in range(len(pair[which]))] for which in (A, B)} if tensors else None
                new.setdefault(part, {})[module] = _with_slot(
                    pair, np.int32(slot * self.rank), rows, self.rank)
            layers.append({**stack, LORA: new})
        return {**policy, "layers": tuple(layers)}


@functools.partial(jax.jit, static_argnums=3)
def _with_slot(pair: Params, at: Array, rows: dict[str, list[Array]] | None, rank: int) -> Params:
    """The pair of all slots with other numbers in `rank` rows of A and columns of B, from `at` on."""
    a, b = pair[A], pair[B]
    new_a, new_b = ((jnp.stack(rows[A]), jnp.stack(rows[B])) if rows else
                    (jnp.zeros_like(a[:, :rank]), jnp.zeros_like(b[..., :rank])))
    zero = jnp.int32(0)
    return {A: jax.lax.dynamic_update_slice(a, new_a, (zero, at, zero)),
            B: jax.lax.dynamic_update_slice(b, new_b, (zero, zero, at))}


def merge_error(policy: Params, product: AdapterProduct, runs: tuple[LayerRun, ...], dtype: str) -> float:
    """What publishing the merged weights of `policy` loses: the norm of (published - base - s B A) over the
    norm of s B A, of all adapters together; 0 for adapters of which B is zero.

    1 says that nothing of the update arrives: each number's is below half a step of the published format.
    `runs`: the linears that the engine holds in FP8.
    """
    lost, whole, first = jnp.float32(0), jnp.float32(0), 0
    for stack in merged_policy(policy, product)["layers"]:
        count = len(stack["input_layernorm"]["weight"])
        leaves = jax.tree_util.tree_flatten_with_path(stack, is_leaf=lambda x: isinstance(x, MergedWeight))[0]
        for path, leaf in leaves:
            if isinstance(leaf, MergedWeight):
                for i in range(count):
                    (fp8,) = (path[-2].key in run.fp8 for run in runs if run.start <= first + i < run.stop)
                    parts = _lost(leaf, jnp.int32(i), dtype, fp8)
                    lost, whole = lost + parts[0], whole + parts[1]
        first += count
    return float(jnp.sqrt(lost / whole)) if whole > 0 else 0.0


@functools.partial(rounding_exact_jit, static_argnums=(2, 3))
def _lost(leaf: MergedWeight, row: Array, dtype: str, fp8: bool) -> tuple[Array, Array]:
    return leaf.rows(row, 1).lost(dtype, fp8)


@dataclasses.dataclass(frozen=True)
class AdaptedWeights:
    """AdaptedSource of a policy with adapters, which are not merged into its weights. bare: the policy
    without.

    Tensors of the base are Constant here: an engine of this process holds the learner's own, and only
    adapters are sent again.
    """

    base: LearnerWeights
    adapters: AdapterWeights
    bare: Params

    def base_parts(self) -> tuple[Array, ...]:
        return tuple(jax.tree.leaves(self.bare))

    def manifest(self) -> tuple[ParamMeta, ...]:
        return (*self.base.manifest(), *self.adapters.manifest())

    def __iter__(self) -> Iterator[tuple[str, Array | StackRow | Constant]]:
        yield from ((name, Constant(buffer)) for name, buffer in self.base)
        yield from self.adapters


class AdapterWeights:
    """StackSource of a policy's adapters alone. `whole` moves a leaf to one device."""

    def __init__(self, policy: Params, adapters: Adapters, whole: Callable[[Array], Array] = whole):
        self._adapters = adapters
        self._stacks = [_folded(jax.tree.map(whole, stack[LORA]), adapters.product)
                        for stack in policy["layers"]]
        self._firsts = list(itertools.accumulate(map(_layers, self._stacks), initial=0))

    def manifest(self) -> tuple[ParamMeta, ...]:
        return self._adapters.manifest()

    def __iter__(self) -> Iterator[tuple[str, StackRow]]:
        for name, layer, part, module, which, _ in self._adapters.names():
            of = bisect.bisect(self._firsts, layer) - 1
            yield name, StackRow(self._stacks[of][part][module][which], layer - self._firsts[of])

    def stacks(self, nbytes: int) -> Iterator[list[Rows]]:
        """The same tensors by whole stacks, as in `StackSource`; all are there already."""
        for first, stack in zip(self._firsts, self._stacks):
            rows: dict[tuple[str, str, str], list[str]] = {}
            for name, layer, *path, _ in self._adapters.names():
                if first <= layer < first + _layers(stack):
                    rows.setdefault((path[0], path[1], path[2]), []).append(name)
            yield [Rows(tuple(names), stack[part][module][which], 0, True)
                   for (part, module, which), names in rows.items()]


def _layers(adapters: Params) -> int:
    return len(jax.tree.leaves(adapters)[0])


@functools.partial(rounding_exact_jit, static_argnums=1)
def _folded(adapters: Params, product: AdapterProduct) -> Params:
    """Adapters with s B in place of B, rounded to their type."""
    fold = lambda pair: {A: pair[A], B: (product.scale * pair[B].astype(jnp.float32)).astype(product.dtype)}
    return {part: {name: fold(pair) for name, pair in modules.items()} for part, modules in adapters.items()}
