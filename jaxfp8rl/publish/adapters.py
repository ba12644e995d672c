"""Adapters on the wire, after the tensors of the base: under PEFT's names without its prefix, one tensor a
layer, A [r, K] and B [N, r]."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bridges.api import ParamMeta, StackRow
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.adapters import LORA, A, B, MergedWeight, merged_policy
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import AdapterProduct
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.types import Params


class Adapters(NamedTuple):
    """The shape of a policy's adapters. shapes: "self_attn.q_proj" -> (N, K) of the linears that have one."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    layers: int
    rank: int
    dtype: str

    def names(self) -> Iterator[tuple[str, int, str, str, str, tuple[int, int]]]:
        """(name, layer, part, module, "lora_A" or "lora_B", shape) of every tensor, in order."""
        for layer in range(self.layers):
            for linear, (n, k) in self.shapes:
                part, module = linear.split(".")
                for which, shape in ((A, (self.rank, k)), (B, (n, self.rank))):
                    yield f"model.layers.{layer}.{linear}.{which}.weight", layer, part, module, which, shape

    def manifest(self) -> tuple[ParamMeta, ...]:
        return tuple(ParamMeta(name, self.dtype, shape) for name, *_, shape in self.names())

    def assemble(self, runs: tuple[LayerRun, ...], tensors: Mapping[str, Array]) -> Params:
        """Wire tensors -> the adapters' part of a policy, with one stack of layers a run."""
        stacks: dict[tuple[str, str, str], list[Array]] = {}
        for name, _, *path, _ in self.names():
            stacks.setdefault((path[0], path[1], path[2]), []).append(jnp.asarray(tensors[name]))
        layers = []
        for run in runs:
            adapters: Params = {}
            for (part, module, which), rows in stacks.items():
                pair = adapters.setdefault(part, {}).setdefault(module, {})
                pair[which] = jnp.stack(rows[run.start : run.stop])
            layers.append({LORA: adapters})
        return {"layers": tuple(layers)}


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


class AdaptedWeights(LearnerWeights):
    """WeightSource of a policy with adapters, which are not merged into its weights."""

    def __init__(self, cfg: ModelConfig, policy: Params, runs: tuple[LayerRun, ...], weight_dtype: str,
                 adapters: Adapters):
        super().__init__(cfg, policy, runs, weight_dtype)
        self._adapters, self._stacks = adapters, policy["layers"]

    def manifest(self) -> tuple[ParamMeta, ...]:
        return (*super().manifest(), *self._adapters.manifest())

    def __iter__(self) -> Iterator[tuple[str, Array | StackRow]]:
        yield from super().__iter__()
        places = [(stack, row) for stack in self._stacks
                  for row in range(len(stack["input_layernorm"]["weight"]))]
        for name, layer, part, module, which, _ in self._adapters.names():
            stack, row = places[layer]
            yield name, StackRow(stack[LORA][part][module][which], row)
