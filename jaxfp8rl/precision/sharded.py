"""FP8 products of a learner on several devices: `linear` under `shard_map`. To XLA's partitioner the kernels are opaque: it would
gather their operands and run them whole on every device.

    tokens    lie over `Axes.tokens`. Quantisation, the forward and dgrad are local. wgrad is each device's own, then summed: its
              blocks run along a device's tokens, and are those of the whole where every device has a multiple of 128.
    weights   lie by rows [N] over `Axes.gathered` (FSDP): codes and scales, a byte an element, are gathered where they are used;
              what leaves the backward is the shard of the summed gradient, in the type of the weight's handle.
    outputs   lie as rows of the weight that are over `Axes.split` (tensor parallel) and stay there; dx is summed over it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxfp8rl.precision.linear import QuantizedWeight, TrainableWeight, linear
from jaxfp8rl.precision.recipe import Precision
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import AMAX_FLOOR, E4M3

Weight = Array | QuantizedWeight | TrainableWeight


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes of a mesh by what lies over them; see above. None: nothing is gathered, or split."""

    tokens: tuple[str, ...] = ("data", "fsdp")
    gathered: str | None = "fsdp"
    split: str | None = None

    @property
    def rows(self) -> tuple[str, ...]:
        """Of a weight, as it is stored."""
        return tuple(axis for axis in (self.split, self.gathered) if axis)


def sharded_linear(mesh: Mesh, axes: Axes) -> Callable[..., Array]:
    """`linear(x [B, ..., K], weight [N, K], precision, fp8, amax_floor) -> [B, ..., N]` with B over `axes.tokens`, N over
    `axes.rows` in the weight, its scales and its handle, over `axes.split` in the result; differentiable as `linear` is. A
    decoder layer takes it as its `product`.

    Raises ValueError, when it is traced, where an axis does not divide what lies over it, or a 128x128 block would be cut.
    """
    _check_axes(mesh, axes)

    def run(x: Array, weight: Weight, precision: Precision, fp8: bool, amax_floor: float = AMAX_FLOOR) -> Array:
        _check_rows(mesh, axes, jax.tree.leaves(weight)[0].shape[0], fp8)
        _check_divides(mesh, axes.tokens, x.shape[0], "rows of tokens")

        def local(x: Array, weight: Weight) -> Array:
            return linear(x, gathered(weight, axes.gathered), precision, fp8, amax_floor)

        y = P(axes.tokens, *(None,) * (x.ndim - 2), axes.split)
        # unchecked: kernels do not say over which axes their results vary
        return jax.shard_map(local, mesh=mesh, in_specs=(P(axes.tokens), P(axes.rows)), out_specs=y, check_vma=False)(x, weight)

    return run


def sharded_of(mesh: Mesh, axes: Axes) -> Callable[[Array], QuantizedWeight]:
    """`QuantizedWeight.of` of [..., N, K] with N over `axes.rows`: local, and the same bits. Raises as `sharded_linear`."""
    _check_axes(mesh, axes)

    def run(weight: Array) -> QuantizedWeight:
        _check_rows(mesh, axes, weight.shape[-2], quantized=True)
        rows = P(*(None,) * (weight.ndim - 2), axes.rows)
        return jax.shard_map(QuantizedWeight.of, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(weight)

    return run


def gathered(weight: Weight, axis: str | None) -> Weight:
    """Inside a `shard_map`: the weight [N, K] of all its shards by rows over `axis`, whose gradient is the shard of the sum."""
    if axis is None:
        return weight
    if isinstance(weight, TrainableWeight):
        return TrainableWeight(gathered(weight.quantized, axis), _whole(axis, weight.handle))
    return jax.tree.map(functools.partial(_all_gather, axis), weight)


def _all_gather(axis: str, shard: Array) -> Array:
    """By rows; codes as bytes, which no compiler widens on their way."""
    if shard.dtype != E4M3:
        return lax.all_gather(shard, axis, tiled=True)
    codes = lax.all_gather(lax.bitcast_convert_type(shard, jnp.uint8), axis, tiled=True)
    return lax.bitcast_convert_type(codes, E4M3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(axis: str, handle: Array) -> Array:
    """Handles are zeros: nothing is sent."""
    return jnp.zeros((handle.shape[0] * lax.axis_size(axis), *handle.shape[1:]), handle.dtype)


def _whole_bwd(axis: str, _: None, gradient: Array) -> tuple[Array]:
    return (lax.psum_scatter(gradient, axis, tiled=True),)


_whole.defvjp(lambda axis, handle: (_whole(axis, handle), None), _whole_bwd)


def _check_axes(mesh: Mesh, axes: Axes) -> None:
    used = {*axes.tokens, *axes.rows}
    if missing := used - set(mesh.axis_names):
        raise ValueError(f"the mesh has no axis {', '.join(sorted(missing))}: its axes are {', '.join(mesh.axis_names)}")
    if axes.split in axes.tokens:
        raise ValueError(f'tokens lie over "{axes.split}", so the outputs of a weight cannot be split over it')
    if idle := [name for name, size in mesh.shape.items() if name not in used and size > 1]:
        raise ValueError(f"nothing lies over axis {', '.join(idle)} of the mesh: its devices would all compute the same")


def _check_rows(mesh: Mesh, axes: Axes, rows: int, quantized: bool) -> None:
    _check_divides(mesh, axes.rows, rows, "rows of a weight")
    each = rows // math.prod(mesh.shape[axis] for axis in axes.rows)
    if quantized and axes.rows and each % BLOCK:
        over = _named(mesh, axes.rows)
        raise ValueError(f"{rows} rows of an FP8 weight over {over} are {each} each: a multiple of {BLOCK} is wanted")


def _check_divides(mesh: Mesh, axes: tuple[str, ...], size: int, what: str) -> None:
    if size % math.prod(mesh.shape[axis] for axis in axes):
        raise ValueError(f"{size} {what} do not divide over {_named(mesh, axes)}")


def _named(mesh: Mesh, axes: tuple[str, ...]) -> str:
    return " and ".join(f'"{axis}" of {mesh.shape[axis]}' for axis in axes)
