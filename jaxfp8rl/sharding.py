"""A learner on several devices: what is large lies over all of them (FSDP; ZeRO-3, Rajbhandari et al. 2020, section 5).

    tokens    rows of a micro-batch, R over the devices: each computes its own rows with whole weights
    weights   rows [N], or experts [E], of masters, moments, gradients and the policy. A layer's are gathered where it is
              computed, and again where it is computed again; codes at a byte an element. What leaves the backward is the shard of
              the summed gradient
    vectors   norms and counters, on every device

What computes with the model runs inside a `shard_map`, where kernels see the arrays of one device: to XLA's partitioner they are
opaque, it would gather their operands and run them whole everywhere. What is elementwise (the optimiser) or small (corrections)
is left to the partitioner. With one device nothing of this is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.precision.linear import TrainableWeight
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import E4M3

AXIS = "fsdp"
ALL = P()  # on every device
ROWS = P(None, AXIS)  # [M, R, T] over R


class Layout(NamedTuple):
    """Where a learner's arrays lie: over the axis "fsdp" of `mesh`, or on one device if that is None."""

    mesh: Mesh | None = None

    def specs(self, tree: Any) -> Any:
        """A PartitionSpec for each leaf of masters, moments, gradients or a policy."""
        return jax.tree_util.tree_map_with_path(_spec, tree)

    def place(self, tree: Any) -> Any:
        """The same arrays where they belong; committed, as those that a program returns are."""
        if self.mesh is None:
            return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)
        return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)), tree, self.specs(tree))

    def keep(self, tree: Any) -> Any:
        """Inside `jit`: a program's result lies as its arguments do."""
        if self.mesh is None:
            return tree
        place = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        return jax.tree.map(place, tree, self.specs(tree))

    def run(self, f: Callable, arguments: tuple, results: Any) -> Callable:
        """`f` on every device, of its part of the arguments; their specs and the results'."""
        if self.mesh is None:
            return f
        # unchecked: kernels do not say over which axes their results vary
        return jax.shard_map(f, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False)

    def on_weights(self, f: Callable[[Any], Any], weights: Any) -> Any:
        """f(weights) where f treats every row of blocks by itself."""
        if self.mesh is None:
            return f(weights)
        return self.run(f, (self.specs(weights),), self.specs(jax.eval_shape(f, weights)))(weights)

    def gather(self, weights: Any) -> Any:
        """Inside `run`: whole weights of a device's shards, a layer's [N, K] or those outside the layers; differentiable."""
        if self.mesh is None:
            return weights
        one, is_leaf = lambda path, w: _gathered(w) if _is_split(path, w) else w, lambda w: isinstance(w, TrainableWeight)
        return jax.tree_util.tree_map_with_path(one, weights, is_leaf=is_leaf)

    def sum(self, x: Array) -> Array:
        """Inside `run`: over the devices."""
        return x if self.mesh is None else lax.psum(x, AXIS)

    def sum_vectors(self, grads: Any) -> Any:
        """Inside `run`: gradients of what is on every device; the others have been summed on their way out of `gather`."""
        if self.mesh is None:
            return grads
        return jax.tree_util.tree_map_with_path(lambda path, g: g if _is_split(path, g) else lax.psum(g, AXIS), grads)


ONE = Layout()


def make_layout(devices: int) -> Layout:
    """Over the first `devices` local ones. Raises ConfigError where there are fewer."""
    here = jax.local_devices()
    if devices > len(here):
        raise ConfigError(f"train.fsdp = {devices}: this process has {len(here)} devices", f"train.fsdp = {len(here)}, or fewer")
    return ONE if devices == 1 else Layout(Mesh(np.array(here[:devices]), (AXIS,), axis_types=(AxisType.Auto,)))


def check_divides(devices: int, model: ModelConfig, quantized: bool) -> None:
    """Raises ConfigError, naming the first weight whose rows do not divide; `quantized`: in blocks of 128."""
    for e in param_table(model):
        block = BLOCK if quantized and e.role == "linear" else 1
        if len(e.shape) == 2 and len(e.index) < 2 and e.shape[0] % (devices * block):  # of experts whole ones lie on a device
            blocks = f" in whole blocks of {BLOCK}" if block > 1 else ""
            raise ConfigError(f"train.fsdp = {devices} does not divide the {e.shape[0]} rows of {e.hf_name}{blocks}", "use fewer")


def _is_split(path: tuple, leaf: Any) -> bool:
    return jax.tree.leaves(leaf)[0].ndim > 1 and "norm" not in jax.tree_util.keystr(path)


def _spec(path: tuple, leaf: Any) -> P:
    if not _is_split(path, leaf):
        return ALL
    return P(None, AXIS) if leaf.ndim == 4 else P(*(None,) * (leaf.ndim - 2), AXIS)


def _gathered(weight: Any) -> Any:
    if isinstance(weight, TrainableWeight):
        return TrainableWeight(_gathered(weight.quantized), _whole(weight.handle))
    return jax.tree.map(_all_gather, weight)


def _all_gather(shard: Array) -> Array:
    """By rows; codes as bytes, which no compiler widens on their way."""
    if shard.dtype != E4M3:
        return lax.all_gather(shard, AXIS, tiled=True)
    return lax.bitcast_convert_type(lax.all_gather(lax.bitcast_convert_type(shard, jnp.uint8), AXIS, tiled=True), E4M3)


@jax.custom_vjp
def _whole(handle: Array) -> Array:
    """Handles are zeros: nothing is sent."""
    return jnp.zeros((handle.shape[0] * lax.axis_size(AXIS), *handle.shape[1:]), handle.dtype)


_whole.defvjp(lambda handle: (_whole(handle), None), lambda _, gradient: (lax.psum_scatter(gradient, AXIS, tiled=True),))
