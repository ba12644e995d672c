"""A learner on several devices: one mesh of three axes, each of any size, in one process or several
(docs/sharding.md).

    data     rows of a micro-batch, R over the devices; weights are repeated along it, and gradients summed once an update
    fsdp     rows of a micro-batch, too, and the rows of every weight [N, K], or its experts (ZeRO-3, Rajbhandari et al. 2020,
             section 5). A layer's are gathered where it is computed, and again where it is computed again;
             codes at a byte an element. What leaves the backward is the shard of the summed gradient
    tensor   heads, the width of the MLP, experts and words: each device multiplies with its own part of every weight, and what
             their products leave is summed (Shoeybi et al. 2019, section 3). Nothing of a weight is sent

What computes with the model runs inside a `shard_map`, where kernels see the arrays of one device: to XLA's
partitioner they are opaque, it would gather their operands and run them whole everywhere. What is elementwise
(the optimiser) or small (corrections) is left to the partitioner. With one device nothing of this is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.precision.linear import WeightWithGradSlot
from jaxfp8rl.roles import role_of
from pallas_kernels import shards
from pallas_kernels.quantize.reference import E4M3

DATA, FSDP, TENSOR = AXES = "data", "fsdp", "tensor"
ALL = P()  # on every device
ROWS = P(None, (DATA, FSDP))  # [M, R, T] over R


class MeshLayout(NamedTuple):
    """Where a learner's arrays lie: over the axes of `mesh`, or on one device if that is None."""

    mesh: Mesh | None = None

    @property
    def tensor(self) -> int:
        return self.mesh.shape[TENSOR] if self.mesh else 1

    def specs(self, tree: Any) -> Any:
        """A PartitionSpec for each leaf of masters, moments, gradients or a policy."""
        return jax.tree_util.tree_map_with_path(_spec, tree)

    def place(self, tree: Any) -> Any:
        """The same arrays where they belong; committed, as those that a program returns are."""
        if (mesh := self.mesh) is None:
            return jax.tree.map(lambda x: jax.device_put(x, x.sharding), tree)
        return jax.tree.map(_placed, tree, self._shardings(mesh, tree))

    def keep(self, tree: Any) -> Any:
        """Inside `jit`: a program's result lies as its arguments do."""
        if (mesh := self.mesh) is None:
            return tree
        return lax.with_sharding_constraint(tree, self._shardings(mesh, tree))

    def _shardings(self, mesh: Mesh, tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs(tree))

    def run(self, f: Callable, arguments: tuple, results: Any) -> Callable:
        """`f` on every device, of its part of the arguments; their specs and the results'."""
        if self.mesh is None:
            return f
        # unchecked: kernels do not say over which axes their results vary
        return jax.shard_map(f, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False)

    def on_weights(self, f: Callable[[Any], Any], weights: Any) -> Any:
        """f(weights) where f treats every block of 128x128 by itself."""
        if self.mesh is None:
            return f(weights)
        return self.run(f, (self.specs(weights),), self.specs(jax.eval_shape(f, weights)))(weights)

    def gather(self, weights: Any) -> Any:
        """Inside `run`: a device's shards, a layer's [N, K] or those outside the layers -> all rows of its
        part along "tensor"; differentiable."""
        if self.mesh is None:
            return weights
        one, is_leaf = lambda path, w: _gathered(w) if _is_split(path, w) else w, lambda w: isinstance(
            w, WeightWithGradSlot)
        return jax.tree_util.tree_map_with_path(one, weights, is_leaf=is_leaf)

    def copy_to_tensor_parallel(self, x: Array) -> Array:
        """Inside `run`: what all devices along "tensor" have alike, for each to compute its part with."""
        return x if self.tensor == 1 else shards.enter(x, TENSOR)

    def reduce_from_tensor_parallel(self, part: Array) -> Array:
        """Inside `run`: the sum of the parts along "tensor", which all of them have alike then."""
        return part if self.tensor == 1 else shards.leave(part, TENSOR)

    def lookup(self, table: Array, words: Array) -> Array:
        """Inside `run`: rows of `table`, of which a device has those of its words."""
        if self.tensor == 1:
            return table[words]
        here = words - lax.axis_index(TENSOR) * table.shape[0]
        own = (here >= 0) & (here < table.shape[0])
        return self.reduce_from_tensor_parallel(jnp.where(own[..., None], table[jnp.where(own, here, 0)],
                                    jnp.zeros((), table.dtype)))

    def experts(self, ids: Array, count: int) -> tuple[Array, int]:
        """Inside `run`: numbers of experts -> those among a device's own, and how many these are, which
        stands for all others."""
        if self.tensor == 1:
            return ids, count
        own = count // self.tensor
        here = ids - lax.axis_index(TENSOR) * own
        return jnp.where((here >= 0) & (here < own), here, own), own

    def join(self, part: Array) -> Array:
        """Inside `run`: what the devices along "tensor" have of a vector, in one. Not differentiated."""
        return part if self.tensor == 1 else lax.all_gather(part, TENSOR, tiled=True)

    def sum(self, x: Array) -> Array:
        """Inside `run`: over the rows of all devices."""
        return x if self.mesh is None else lax.psum(x, (DATA, FSDP))

    def sum_gradients(self, grads: Any) -> Any:
        """Inside `run`: over the rows of all devices. Those of shards have been summed along "fsdp" on their
        way out of `gather`, and all of them along "tensor"."""
        if self.mesh is None:
            return grads
        over = lambda path, g: lax.psum(g, DATA if _is_split(path, g) else (DATA, FSDP))
        return jax.tree_util.tree_map_with_path(over, grads)


ONE = MeshLayout()


def make_mesh_layout(data: int = 1, fsdp: int = 1, tensor: int = 1, processes: int = 1) -> MeshLayout:
    """Over the first data * fsdp * tensor local devices, or over all devices of several processes; those
    along "tensor" are neighbours. Raises ConfigError where there are fewer, or where a process would have
    none of it."""
    here, count = jax.devices() if processes > 1 else jax.local_devices(), data * fsdp * tensor
    if count > len(here) or (processes > 1 and count != len(here)):
        settings = {"train.data": data, "train.fsdp": fsdp, "train.tensor": tensor}
        product = " * ".join(f"{name} = {size}" for name, size in settings.items()
                             if size > 1) or "train.data = 1"
        have = f"{len(here)} device{'s' if len(here) > 1 else ''}"
        if processes > 1:
            raise ConfigError(f"{product}: the {processes} processes have {have}",
                              f"{len(here)} together, no fewer")
        raise ConfigError(f"{product}: this process has {have}", f"{len(here)} together, or fewer")
    if len(kinds := sorted({device.device_kind for device in here[:count]})) > 1:
        raise ConfigError(f"devices of several kinds: {', '.join(kinds)}: all compute one program",
                          "leave out those of a kind")
    grid = np.array(here[:count]).reshape(data, fsdp, tensor)
    return ONE if count == 1 else MeshLayout(Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3))


def whole(x: Array) -> Array:
    """On one device of this process, where its engine can read it. Where it is split over processes, all of
    them call this."""
    devices = x.sharding.device_set
    if len(devices) == 1:
        return x
    if x.is_fully_addressable:
        return jax.device_put(x, min(devices, key=lambda device: device.id))
    if not x.is_fully_replicated:
        assert isinstance(x.sharding, NamedSharding)  # as MeshLayout places it
        x = _replicate(x.sharding.mesh)(x)
    return min(x.addressable_shards, key=lambda shard: shard.device.id).data


def fetch(tree: Any) -> Any:
    """As numpy arrays, wherever their parts are. Where these are with several processes, all of them call
    this."""
    split = lambda x: isinstance(x, Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    return jax.device_get(jax.tree.map(lambda x: whole(x) if split(x) else x, tree))


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Array], Array]:
    return jax.jit(lambda x: _from_bytes(_as_bytes(x), x), out_shardings=NamedSharding(mesh, ALL))


def _placed(x: Any, sharding: NamedSharding) -> Array:
    if sharding.is_fully_addressable or (isinstance(x, Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)  # each process makes its own part
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def gloo_warning(layout: MeshLayout) -> str | None:
    """What to say at the start of a run whose gradients are scattered between processes on CPUs."""
    mesh = layout.mesh
    if mesh is None or not mesh.is_multi_process or mesh.shape[FSDP] == 1 or mesh.devices.flat[
            0].platform != "cpu":
        return None
    return (
        f"train.fsdp = {mesh.shape[FSDP]} in several processes on CPUs: JAX's reduce-scatter there may return wrong sums of "
        "large weights (jax-ml/jax#40830)\n  next step: train.data and train.tensor instead, or GPUs"
    )


def _is_split(path: tuple, leaf: Any) -> bool:
    return jax.tree.leaves(leaf)[0].ndim > 1 and role_of(path).fsdp


def _spec(path: tuple, leaf: Any) -> P:
    """Of a leaf [N, K], [L, N, K], or of experts [L, E, N, K]: whole experts lie on a device."""
    if not _is_split(path, leaf):
        return ALL
    if leaf.ndim == 4:
        return P(None, (TENSOR, FSDP))
    lead = (None,) * (leaf.ndim - 2)
    by_axis = {"rows": P(*lead, (TENSOR, FSDP)), "columns": P(*lead, FSDP, TENSOR), "neither": P(*lead, FSDP)}
    return by_axis[role_of(path).tensor]


def _gathered(weight: Any) -> Any:
    if isinstance(weight, WeightWithGradSlot):
        return WeightWithGradSlot(_gathered(weight.quantized), _whole(weight.grad_slot))
    return jax.tree.map(_all_gather, weight)


def _all_gather(shard: Array) -> Array:
    """By rows; codes as bytes, which no compiler widens on their way."""
    return _from_bytes(lax.all_gather(_as_bytes(shard), FSDP, tiled=True), shard)


def _as_bytes(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == E4M3 else x


def _from_bytes(sent: Array, like: Array) -> Array:
    return lax.bitcast_convert_type(sent, E4M3) if like.dtype == E4M3 else sent


@jax.custom_vjp
def _whole(grad_slot: Array) -> Array:
    """Handles are zeros: nothing is sent."""
    return jnp.zeros((grad_slot.shape[0] * lax.axis_size(FSDP), *grad_slot.shape[1:]), grad_slot.dtype)


_whole.defvjp(lambda grad_slot: (_whole(grad_slot), None),
              lambda _, gradient: (lax.psum_scatter(gradient, FSDP, tiled=True),))
