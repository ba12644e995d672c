"""Which box of each published tensor a device holds, read off the shardings of a policy's leaves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import Sharding

from bridges.api import BridgeError, Cut
from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.quantize.reference import BLOCK

Device = Any  # of JAX, whose class has no public name that a type checker takes
Spread = tuple[tuple[Device, Cut], ...]  # the box of each device that holds one


@functools.cache
def spread(sharding: Sharding, shape: tuple[int, ...]) -> Spread:
    """The box of an array that each device holds, in the order of the devices' numbers."""
    found = sharding.devices_indices_map(shape).items()
    return tuple((device, tuple(axis.indices(n)[:2] for axis, n in zip(box, shape)))
                 for device, box in sorted(found, key=lambda x: x[0].id))


def of_row(leaf: Any, at: tuple[int, ...]) -> Spread:
    """Of the tensor `leaf[at]`."""
    return tuple((device, box[len(at) :]) for device, box in spread(leaf.sharding, leaf.shape)
                 if all(start <= i < stop for i, (start, stop) in zip(at, box)))


def of_tensors(name: str, leaf: Any, at: tuple[int, ...], fp8: bool) -> tuple[Spread, ...]:
    """Of the tensor `leaf[at]`, and in FP8 of its scales. Raises BridgeError if a device would quantise a
    part of a block."""
    if isinstance(leaf, QuantizedWeight):
        return of_row(leaf.codes, at), of_row(leaf.scale, at)
    found = of_row(leaf, at)
    return (found, tuple((device, _of_scales(name, box, leaf.shape[len(at) :]))
                         for device, box in found)) if fp8 else (
        found,)


def _of_scales(name: str, box: Cut, shape: tuple[int, ...]) -> Cut:
    if any(edge % BLOCK and edge != n for edges, n in zip(box, shape) for edge in edges):
        raise BridgeError(f"{name} {shape}: a device of the learner holds {box}, which cuts through an FP8 "
                          f"block of {BLOCK}", "spread the learner over fewer devices along train.fsdp "
                                      "and train.tensor")
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)


@functools.cache
def by_process(spreads: tuple[Spread, ...]) -> tuple[tuple[tuple[int, Cut], ...], ...]:
    """By tensor: each process, and a box that one of its devices holds, once."""
    of = {spread: tuple(dict.fromkeys((d.process_index, box) for d, box in spread))
          for spread in set(spreads)}
    return tuple(of[spread] for spread in spreads)


def holders(spread: Spread, boxes: Sequence[Cut]) -> list[Device]:
    """The first device of this process that holds each of `boxes`."""
    here = jax.process_index()
    return [next(d for d, have in spread if have == box and d.process_index == here) for box in boxes]


def experts(leaf: Any, device: Device) -> range:
    """Those that a device holds of a leaf [L, E, ...]."""
    leaf = leaf.codes if isinstance(leaf, QuantizedWeight) else leaf
    return range(*dict(spread(leaf.sharding, leaf.shape))[device][1])


def shapes_of(policy: Any) -> tuple[Any, tuple[Any, ...]]:
    """The structure of a tree, and the shape and sharding of each leaf."""
    leaves, tree = jax.tree.flatten(policy)
    return tree, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves)


def local_trees(policy: Any) -> dict[Device, Any]:
    """The arrays of each device of this process, where they lie; None for those that it has not."""

    def on(device: Device, x: Array) -> Array | None:
        return next((s.data for s in x.addressable_shards if s.device == device), None)

    devices = sorted({s.device for x in jax.tree.leaves(policy) for s in x.addressable_shards},
                     key=lambda d: d.id)
    return {device: jax.tree.map(functools.partial(on, device), policy) for device in devices}
