"""A learner on several devices: one mesh of three axes, each of any size, in one process or several
(docs/sharding.md).

    data     splits the rows R of a micro-batch. Weights are replicated along it; gradients are summed once an
             update.
    fsdp     splits the rows of a micro-batch too, and the rows of every weight [N, K], or its experts
    (ZeRO-3,
             Rajbhandari et al. 2020, section 5). The weights of a layer are gathered where it is computed,
             and again where it is recomputed; FP8 codes at a byte an element. The backward pass returns the
             shard of the summed gradient.
    tensor   splits heads, the width of the MLP, experts and the vocabulary. Each device multiplies with its
    own
             part of every weight, and the partial products are summed (Shoeybi et al. 2019, section 3). No
             part of a weight is sent.

The model's passes run inside a `shard_map`, where kernels see the arrays of one device. To XLA's partitioner
kernels are opaque: it would gather their operands and run them whole on every device. Elementwise work (the
optimiser) and small work (corrections) is left to the partitioner. On one device none of this applies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.precision.weights import WeightWithGradSlot
from jaxfp8rl.roles import role_of
from pallas_kernels import shards
from pallas_kernels.quantize.reference import E4M3

DATA, FSDP, TENSOR = AXES = "data", "fsdp", "tensor"
ALL = P()  # on every device
ROWS = P(None, (DATA, FSDP))  # [M, R, T] over R


class MeshLayout(NamedTuple):
    """The placement of a learner's arrays: over the axes of `mesh`, or on one device if that is None."""

    mesh: Mesh | None = None

    @property
    def tensor(self) -> int:
        return self.mesh.shape[TENSOR] if self.mesh else 1

    def specs(self, tree: Any) -> Any:
        """A PartitionSpec for each leaf of masters, moments, gradients or a policy."""
        return jax.tree_util.tree_map_with_path(_spec, tree)

    def place(self, tree: Any) -> Any:
        """Put the arrays where they belong. They are committed, like the results of a program."""
        if (mesh := self.mesh) is None:  # weights of a folder come as NumPy's
            there = lambda x: x.sharding if isinstance(x, Array) else jax.local_devices()[0]
            return jax.tree.map(lambda x: jax.device_put(x, there(x)), tree)
        return jax.tree.map(_placed, tree, self._shardings(mesh, tree))

    def placed_shapes(self, tree: Any) -> Any:
        """The shapes of a tree at the places that `place` gives its arrays. Host memory stays host memory."""
        if self.mesh:
            sharding = self._shardings(self.mesh, tree)
        else:
            sharding = jax.tree.map(lambda _: SingleDeviceSharding(jax.local_devices()[0]), tree)

        def one(x: jax.ShapeDtypeStruct, s: Any) -> jax.ShapeDtypeStruct:
            on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
            return x.update(sharding=s.with_memory_kind("pinned_host") if on_host else s)

        return jax.tree.map(one, tree, sharding)

    def placed_batch(self, batch: Any) -> Any:
        """The shapes of a batch at the places where `upload_rows` leaves it; in one process it stays on the
        host."""
        if (mesh := self.mesh) is None or not mesh.is_multi_process:
            return batch
        return jax.tree.map(lambda x: x.update(sharding=NamedSharding(mesh, ALL)), batch)

    def placed_rows(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The shape of an array [M, R, T] at the place where a program leaves it."""
        return x.update(sharding=NamedSharding(self.mesh, ROWS)
                        if self.mesh else SingleDeviceSharding(jax.local_devices()[0]))

    def own_rows(self, rows: int) -> dict[int, list[int]]:
        """For each process, which of the `rows` rows of a micro-batch its devices hold."""
        assert self.mesh is not None
        held: dict[int, set[int]] = {}
        for device, (of,) in NamedSharding(self.mesh, P((DATA, FSDP))).devices_indices_map((rows,)).items():
            held.setdefault(device.process_index, set()).update(range(rows)[of])
        return {process: sorted(own) for process, own in held.items()}

    def upload_rows(self, batch: Any, own: list[int], rows: int) -> Any:
        """The arrays [M * len(own), T, ...] of every process, with its `own` of the `rows` rows of each
        micro-batch, as arrays [M, rows, T, ...] on every device. All processes call this."""
        assert self.mesh is not None
        sharding = NamedSharding(self.mesh, ROWS)

        def one(x: np.ndarray) -> Array:
            local = x.reshape(-1, len(own), *x.shape[1:])
            return jax.make_array_from_process_local_data(sharding, local, (len(local), rows, *x.shape[1:]))

        return _on_all(self.mesh)(jax.tree.map(one, batch))

    def keep(self, tree: Any) -> Any:
        """Inside `jit`: constrain a result to the sharding of the arguments."""
        if (mesh := self.mesh) is None:
            return tree
        return lax.with_sharding_constraint(tree, self._shardings(mesh, tree))

    def _shardings(self, mesh: Mesh, tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs(tree))

    def run(self, f: Callable, arguments: tuple, results: Any) -> Callable:
        """`f` on every device, given its part of the arguments. `arguments` and `results` are their specs."""
        if self.mesh is None:
            return f
        # unchecked: kernels do not declare the axes along which their results vary
        return jax.shard_map(f, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False)

    def on_weights(self, f: Callable[[Any], Any], weights: Any) -> Any:
        """f(weights), for an f that treats every block of 128x128 separately."""
        if self.mesh is None:
            return f(weights)
        return self.run(f, (self.specs(weights),), self.specs(jax.eval_shape(f, weights)))(weights)

    def gather(self, weights: Any) -> Any:
        """Inside `run`: gather all rows of a device's part along "tensor", of the weights [N, K] of one layer
        or of those outside the layers. Differentiable."""
        if self.mesh is None:
            return weights
        one, is_leaf = lambda path, w: _gathered(w) if _is_split(path, w) else w, lambda w: isinstance(
            w, WeightWithGradSlot)
        return jax.tree_util.tree_map_with_path(one, weights, is_leaf=is_leaf)

    def copy_to_tensor_parallel(self, x: Array) -> Array:
        """Inside `run`: x, replicated along "tensor", as the input of a product that each device does in
        part."""
        return x if self.tensor == 1 else shards.enter(x, TENSOR)

    def reduce_from_tensor_parallel(self, part: Array) -> Array:
        """Inside `run`: the sum of the parts along "tensor", replicated."""
        return part if self.tensor == 1 else shards.leave(part, TENSOR)

    def lookup(self, table: Array, words: Array) -> Array:
        """Inside `run`: rows of `table`, of which each device holds a part of the vocabulary."""
        if self.tensor == 1:
            return table[words]
        here = words - lax.axis_index(TENSOR) * table.shape[0]
        own = (here >= 0) & (here < table.shape[0])
        return self.reduce_from_tensor_parallel(jnp.where(own[..., None], table[jnp.where(own, here, 0)],
                                    jnp.zeros((), table.dtype)))

    def experts(self, ids: Array, count: int) -> tuple[Array, int]:
        """Inside `run`: (indices among the device's own experts, the number of these). The number itself, as
        an index, stands for every other device's experts."""
        if self.tensor == 1:
            return ids, count
        own = count // self.tensor
        here = ids - lax.axis_index(TENSOR) * own
        return jnp.where((here >= 0) & (here < own), here, own), own

    def join(self, part: Array) -> Array:
        """Inside `run`: the whole of a vector that is split along "tensor". Not differentiated."""
        return part if self.tensor == 1 else lax.all_gather(part, TENSOR, tiled=True)

    def sum(self, x: Array) -> Array:
        """Inside `run`: the sum over the rows of all devices."""
        return x if self.mesh is None else lax.psum(x, (DATA, FSDP))

    def sum_gradients(self, grads: Any) -> Any:
        """Inside `run`: the sum over the rows of all devices. The backward pass of `gather` has summed those
        of shards along "fsdp", and all are summed along "tensor"."""
        if self.mesh is None:
            return grads
        over = lambda path, g: lax.psum(g, DATA if _is_split(path, g) else (DATA, FSDP))
        return jax.tree_util.tree_map_with_path(over, grads)


ONE = MeshLayout()


def make_mesh_layout(data: int = 1, fsdp: int = 1, tensor: int = 1, processes: int = 1) -> MeshLayout:
    """A layout over the first data * fsdp * tensor local devices, or over all devices of several processes.
    Devices along "tensor" are neighbours. Raises ConfigError if there are fewer, or if a process would have
    no part of it."""
    here, count = jax.devices() if processes > 1 else jax.local_devices(), data * fsdp * tensor
    if count > len(here) or (processes > 1 and count != len(here)):
        settings = {"train.data": data, "train.fsdp": fsdp, "train.tensor": tensor}
        product = " * ".join(f"{name} = {size}" for name, size in settings.items()
                             if size > 1) or "train.data = 1"
        have = f"{len(here)} device{'s' if len(here) > 1 else ''}"
        if processes > 1:
            raise ConfigError(f"{product}: the {processes} processes have {have}",
                              f"set train.data * train.fsdp * train.tensor to {len(here)}")
        raise ConfigError(f"{product}: this process has {have}",
                          f"set train.data * train.fsdp * train.tensor to {len(here)} at most, or run where "
                          f"more devices are")
    if len(kinds := sorted({device.device_kind for device in here[:count]})) > 1:
        raise ConfigError(f"devices of several kinds: {', '.join(kinds)}: all must run the same program",
                          "use devices of one kind")
    grid = np.array(here[:count]).reshape(data, fsdp, tensor)
    return ONE if count == 1 else MeshLayout(Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3))


def whole(x: Array) -> Array:
    """The array on one device of this process, where its engine can read it. If the array is split over
    processes, all of them call this."""
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
    """The tree as numpy arrays, wherever its parts are. If these are in several processes, all of them call
    this."""
    split = lambda x: isinstance(x, Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    return jax.device_get(jax.tree.map(lambda x: whole(x) if split(x) else x, tree))


@functools.cache
def _replicate(mesh: Mesh) -> Callable[[Array], Array]:
    return jax.jit(lambda x: _from_bytes(_as_bytes(x), x), out_shardings=NamedSharding(mesh, ALL))


@functools.cache
def _on_all(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, ALL))


def _placed(x: Any, sharding: NamedSharding) -> Array:
    if sharding.is_fully_addressable or (isinstance(x, Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)  # each process makes its own part
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def gloo_warning(layout: MeshLayout) -> str | None:
    """The warning for a run whose gradients are scattered between processes on CPUs, or None."""
    mesh = layout.mesh
    if mesh is None or not mesh.is_multi_process or mesh.shape[FSDP] == 1 or mesh.devices.flat[
            0].platform != "cpu":
        return None
    return (
        f"train.fsdp = {mesh.shape[FSDP]} in several processes on CPUs: JAX's reduce-scatter there may "
        "return wrong sums of large weights (jax-ml/jax#40830)\n  next step: train.data and train.tensor "
        "instead, or GPUs"
    )


def _is_split(path: tuple, leaf: Any) -> bool:
    return jax.tree.leaves(leaf)[0].ndim > 1 and role_of(path).fsdp


def _spec(path: tuple, leaf: Any) -> P:
    """The spec of a leaf [N, K] or [L, N, K], of biases [N] or [L, N], or of experts [L, E, N, K], each of
    which is whole on a device."""
    if role_of(path).kind == "bias":
        return P(*(None,) * (leaf.ndim - 1), TENSOR)
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
    """Gather the rows. Codes are sent as bytes, which no compiler widens on their way."""
    return _from_bytes(lax.all_gather(_as_bytes(shard), FSDP, tiled=True), shard)


def _as_bytes(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == E4M3 else x


def _from_bytes(sent: Array, like: Array) -> Array:
    return lax.bitcast_convert_type(sent, E4M3) if like.dtype == E4M3 else sent


@jax.custom_vjp
def _whole(grad_slot: Array) -> Array:
    """Gradient slots are zeros: nothing is sent."""
    return jnp.zeros((grad_slot.shape[0] * lax.axis_size(FSDP), *grad_slot.shape[1:]), grad_slot.dtype)


_whole.defvjp(lambda grad_slot: (_whole(grad_slot), None),
              lambda _, gradient: (lax.psum_scatter(gradient, FSDP, tiled=True),))
