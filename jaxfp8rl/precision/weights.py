"""The forms of a weight: codes and scales, codes in an engine's memory, and a weight with a place for its
gradient."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q

# All calls with one shape share a kernel: see linear.py.
quantize_blocks = jax.jit(quantize.quantize_blocks, static_argnames=("rows", "backend"))


class QuantizedWeight(NamedTuple):
    """The published bytes of a weight.

    codes: [..., N, K] float8_e4m3fn. scale: [..., ceil(N/128), ceil(K/128)] float32.
    """

    codes: Array
    scale: Array

    @classmethod
    def of(cls, weight: Array, layers: tuple[Array, int] | None = None) -> QuantizedWeight:
        """Quantise [..., N, K] bfloat16 or float32 in 128x128 blocks.

        A Hopper GPU runs the Hopper kernel, whose bits equal the reference's. The kernel takes a stack of
        layers as one matrix with more rows, unless a block would reach over the end of a layer.

        `layers` (first, count) selects layers of [L, ..., N, K]; `first` is an int32 [] on the device.
        """
        *lead, n, k = weight.shape
        if lead and n % BLOCK:
            return jax.lax.map(cls.of,
                               weight if layers is None else jax.lax.dynamic_slice_in_dim(weight, *layers))
        first = rows = None
        if layers is not None:
            each = math.prod(lead[1:]) * n  # the rows of one layer, with those of all its experts
            first, rows, lead = layers[0] * (each // BLOCK), layers[1] * each, [layers[1], *lead[1:]]
        codes, scale = quantize_blocks(weight.reshape(-1, k), first=first, rows=rows, backend="auto")
        return cls(codes.reshape(*lead, n, k), scale.reshape(*lead, -(-n // BLOCK), -(-k // BLOCK)))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["fused", "scale"],
                   meta_fields=["start", "stop"])
@dataclasses.dataclass(frozen=True)
class EngineWeight:
    """A QuantizedWeight in an engine's memory.

    The engine holds several linears in the one array `fused` [..., R, K] uint8. This weight's codes are its
    rows [start, stop).
    """

    fused: Array
    scale: Array
    start: int
    stop: int

    @property
    def codes(self) -> Array:
        """[..., stop - start, K] float8_e4m3fn."""
        return jax.lax.bitcast_convert_type(self.fused[..., self.start : self.stop, :], q.E4M3)

    def cut_out(self) -> QuantizedWeight:
        """The same weight as a QuantizedWeight, apart from the engine's array."""
        return QuantizedWeight(self.codes, self.scale)


class WeightWithGradSlot(NamedTuple):
    """A weight in a differentiated forward.

    `grad_slot` [..., N, K] holds zeros in the type of the weight's gradient. No product reads it. Its
    cotangent is the gradient of the weight before quantisation (straight-through).
    """

    quantized: QuantizedWeight | EngineWeight
    grad_slot: Array


def is_quantized(leaf: Any) -> bool:
    """Whether a leaf of a tree of weights holds codes and scales."""
    return isinstance(leaf, QuantizedWeight | EngineWeight)


def grad_slots_of(weights: Any, dtype: str) -> Any:
    """The tree by which a loss is differentiated: float weights as they are, and zeros of `dtype` in place of
    quantised weights."""
    zeros_or_leaf = lambda w: jnp.zeros(w.codes.shape, dtype) if is_quantized(w) else w
    return jax.tree.map(zeros_or_leaf, weights, is_leaf=is_quantized)


def trainable(weights: dict, grad_slots: dict) -> dict:
    """The weights that have a slot in `grad_slots`, differentiable by their slots."""
    attach = lambda h, w: WeightWithGradSlot(w, h) if is_quantized(w) else h
    return jax.tree.map(attach, grad_slots, {name: weights[name] for name in grad_slots})


Weight = Array | QuantizedWeight | EngineWeight | WeightWithGradSlot


def concat_quantized(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The weights [N_i, K] as one, [sum of N_i, K].

    For layers that are slices of a stack this costs no more than the slicing does.
    """
    return QuantizedWeight(*map(jnp.concatenate, zip(*weights))) if len(weights) > 1 else weights[0]


def as_quantized(weight: Weight) -> tuple[QuantizedWeight, Array | None]:
    """The operand of an FP8 product, and the array that gets its gradient (None if nothing gets one)."""
    quantized, grad_slot = weight if isinstance(weight, WeightWithGradSlot) else (weight, None)
    if isinstance(quantized, EngineWeight):
        quantized = quantized.cut_out()
    if isinstance(quantized, QuantizedWeight):
        return quantized, grad_slot
    return QuantizedWeight.of(jax.lax.stop_gradient(quantized)), quantized
