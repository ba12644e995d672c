"""The policy on the wire: the learner as a WeightSource in checkpoint layout, and the way back for the embedded engine.

What is quantised in the policy leaves as it is: these bytes are the learner's own. What the engine alone holds in FP8 (recipe
fp8_rollout) is quantised here, from the policy's rounded weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import Array

from bridges.api import ParamMeta
from jaxfp8rl.exact import exact_jit
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, get_param, param_table
from jaxfp8rl.precision.linear import QuantizedWeight
from jaxfp8rl.precision.recipe import LayerRun
from jaxfp8rl.types import Params
from pallas_kernels.quantize.reference import BLOCK

SCALE_SUFFIX = "_scale_inv"


def is_fp8(entry: Entry, runs: tuple[LayerRun, ...]) -> bool:
    """Whether the engine holds this tensor as E4M3 codes and block scales."""
    if entry.role != "linear":
        return False
    return any(run.start <= entry.layer < run.stop and entry.path[-2] in run.fp8 for run in runs)


def wire_manifest(cfg: ModelConfig, runs: tuple[LayerRun, ...], weight_dtype: str) -> tuple[ParamMeta, ...]:
    """What crosses, in HF order: E4M3 weights each followed by their float32 scales, everything else in `weight_dtype`."""
    metas: list[ParamMeta] = []
    for e in param_table(cfg):
        if is_fp8(e, runs):
            scale_shape = tuple(-(-n // BLOCK) for n in e.shape)
            metas.append(ParamMeta(e.hf_name, "float8_e4m3fn", e.shape, "weight", (BLOCK, BLOCK)))
            metas.append(ParamMeta(e.hf_name + SCALE_SUFFIX, "float32", scale_shape, "block_scale", (BLOCK, BLOCK)))
        else:
            metas.append(ParamMeta(e.hf_name, weight_dtype, e.shape))
    return tuple(metas)


class LearnerWeights:
    """WeightSource over a policy (jaxfp8rl.policy). `runs`: which linears the engine computes in FP8."""

    def __init__(self, cfg: ModelConfig, policy: Params, runs: tuple[LayerRun, ...], weight_dtype: str):
        self._args, self._policy = (cfg, runs, weight_dtype), policy

    def manifest(self) -> tuple[ParamMeta, ...]:
        return wire_manifest(*self._args)

    def __iter__(self) -> Iterator[tuple[str, Array]]:
        tensors = _export(*self._args, self._policy)
        return ((m.name, tensors[m.name]) for m in self.manifest())


@functools.partial(exact_jit, static_argnums=(0, 1, 2))
def _export(cfg: ModelConfig, runs: tuple[LayerRun, ...], weight_dtype: str, policy: Params) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for e in param_table(cfg):
        weight = get_param(policy, e)
        if is_fp8(e, runs):
            weight = weight if isinstance(weight, QuantizedWeight) else QuantizedWeight.of(weight)
            tensors[e.hf_name], tensors[e.hf_name + SCALE_SUFFIX] = weight
        else:
            tensors[e.hf_name] = weight.astype(weight_dtype)
    return tensors


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
    return {**params, "layers": tuple(stacks)}


def _put(tree: Params, path: tuple[str, ...], value: Array | QuantizedWeight) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
