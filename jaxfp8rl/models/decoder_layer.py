"""One decoder layer as a record of how it computes, called with its input and its weights.

Letters as in models/transformer.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxfp8rl.distributed.mesh import ONE, MeshLayout
from jaxfp8rl.models import layers as nn
from jaxfp8rl.models import moe
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.families import Activation
from jaxfp8rl.precision.adapters import adapted, has_adapter, with_adapters
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.linear import fused_linears, linear, plus_bias
from jaxfp8rl.precision.mlp import MLP_MODULES, fuses, swiglu_mlp
from jaxfp8rl.precision.records import Precision
from pallas_kernels.quantize.reference import FUSED_AMAX_FLOOR

Params = dict[str, Any]
Residual = Array | nn.UnfusedResidual  # the stream between layers, [B, T, D]


@dataclasses.dataclass(frozen=True)
class DecoderLayer:
    """`layer(x, weights)` -> (x [B, T, D], the second result of `attend`): attention and MLP, with the norms,
    biases and activation that the model's family declares.

    run: the run of equal precision that the layer belongs to.
    rope: cosines and sines of the positions (`layers.rope_tables`).
    attend(q [B, T, H, d], k, v [B, T, K, d]) -> (o [B, T, H, d], anything): attention of rotated heads.
    product(name, x, weight, precision, fp8, amax_floor, bias) -> x @ weight.T + bias: computes every linear
        of that name ("q_proj") in place of `linear`, so that a probe can see its input. Linears of one input
        are then not fused.
    mixture(x, weights, precision, fp8) -> y: computes the mixture of experts of a sparse layer
        (`mixture_of`).
    layout: along its "tensor" axis each device has some of the heads and some of the MLP's width.
    """

    cfg: ModelConfig
    precision: Precision
    run: LayerRun
    rope: tuple[Array, Array]
    attend: Callable
    product: Callable | None = None
    mixture: Callable | None = None
    layout: MeshLayout = ONE

    def __call__(self, x: Residual, w: Params) -> tuple[Residual, Any]:
        """x as `transformer.embed` makes it; w: the layer's weights, {"self_attn": {"q_proj": ...}, ...}."""
        norms, w = self.cfg.family.norms, with_adapters(w)
        o, left = self.attention(self.norm(x, w[norms.before_attention], reader="q_proj"), w["self_attn"])
        x = self._add(x, o, w, norms.after_attention)
        y = self.mlp(self.norm(x, w[norms.before_mlp], reader="gate_proj"), w)
        return self._add(x, y, w, norms.after_mlp), left

    def _add(self, x: Residual, y: Array, w: Params, norm: str | None) -> Residual:
        """x + y, or x + norm(y) in families that have a norm there; a compiled engine adds that norm
        unrounded."""
        once = self.precision.rounding.residual_once
        y = self.norm(y, w[norm], dtype="float32" if once else None) if norm else y
        return nn.add_rounding_once(x, y, self.precision.compute_dtype) if once else nn.add_residual(x, y)

    def norm(self, x: Residual, w: Params, reader: str | None = None,
             dtype: DTypeLike | None = None) -> Array:
        """RMSNorm of x. `reader`: the linear that reads it, whose quantiser may be fused into the norm.
        `dtype` of the result: the compute type if None."""
        once = self.precision.rounding.fused and reader not in self.quantizes
        return nn.rms_norm(x, w["weight"], self.cfg.rms_norm_eps, dtype or self.precision.compute_dtype, once,
                           self.cfg.family.unit_offset)

    def attention(self, h: Array, w: Params) -> tuple[Array, Any]:
        """Grouped-query attention with RoPE -> (its output [B, T, D], the second result of `attend`)."""
        h = self.layout.copy_to_tensor_parallel(h)
        q, k, v = (self._heads(_saved(y)) for y in self.linears(h, w, "q_proj", "k_proj", "v_proj"))
        o_BTHd, left = self.attend(self._rotated(q, w, "q_norm"), self._rotated(k, w, "k_norm"), v)
        (o_BTD,) = self.linears(o_BTHd.reshape(*h.shape[:2], -1), w, "o_proj")
        return _saved(self.layout.reduce_from_tensor_parallel(o_BTD)), left

    def mlp(self, h: Array, w: Params) -> Array:
        """The gated MLP, or the mixture of experts of a sparse layer, [B, T, D]."""
        if self.run.sparse:
            mixture = self.mixture or mixture_of(self.cfg, [])
            return mixture(h, w["moe"], self.precision, "gate_proj" in self.run.fp8)
        h, w = self.layout.copy_to_tensor_parallel(h), w["mlp"]
        activation = self.cfg.family.activation
        plain = self.product is None and activation == Activation.SILU and not any(map(has_adapter,
                                                                                       w.values()))
        if plain and fuses(self.precision, self.run.fp8):
            gate, up, down = (w[name]["weight"] for name in MLP_MODULES)
            y = swiglu_mlp(h, gate, up, down, self.precision)
            return self.layout.reduce_from_tensor_parallel(y)
        gate, up = self.linears(h, w, "gate_proj", "up_proj")
        h_BTF = nn.gated(gate, up, self.precision.rounding.fused, activation)
        if "down_proj" not in self.quantizes:
            h_BTF = h_BTF.astype(h.dtype)
        (y,) = self.linears(h_BTF, w, "down_proj")
        return self.layout.reduce_from_tensor_parallel(y)

    def linears(self, x: Array, w: Params, *names: str) -> Sequence[Array]:
        """x by the weight of each name, plus its bias and its adapter's product where it has them."""
        ys = self._of_weights(x, w, *names)
        return [adapted(y, x, w[name]["lora"], self.precision) if has_adapter(w[name]) else y
                for name, y in zip(names, ys)]

    def _of_weights(self, x: Array, w: Params, *names: str) -> Sequence[Array]:
        biases = [w[name].get("bias") for name in names]
        weights, fp8 = [w[name]["weight"] for name in names], [name in self.run.fp8 for name in names]
        own_floor = self.precision.rounding.amax_floor
        floors = [FUSED_AMAX_FLOOR if name in self.quantizes else own_floor for name in names]
        if self.product is None and all(fp8):
            return list(map(plus_bias, fused_linears(x, weights, self.precision, floors[0]), biases))
        product = self.product or (lambda name, *args: linear(*args))
        return [product(name, x, weight, self.precision, *how)
                for name, weight, *how in zip(names, weights, fp8, floors, biases)]

    @functools.cached_property
    def quantizes(self) -> frozenset[str]:
        """The linears whose input is quantised by the kernel that makes it: all but o_proj, whose input
        attention makes, and the experts'."""
        unfused = {"o_proj"}.union(MLP_MODULES if self.run.sparse else ())
        return self.run.fp8 - unfused if self.precision.rounding.fused_quantizer else frozenset()

    def _rotated(self, heads: Array, w: Params, norm: str) -> Array:
        family = self.cfg.family
        weight = self.layout.copy_to_tensor_parallel(w[norm]["weight"]) if family.qk_norm else None
        return nn.apply_rope(heads, *self.rope, weight, self.cfg.rms_norm_eps,
                             self.precision.rounding.fused, family.unit_offset)

    def _heads(self, y: Array) -> Array:
        return y.reshape(*y.shape[:2], -1, self.cfg.head_dim)


def mixture_of(
    cfg: ModelConfig, routings: list[moe.Routing], live_BT: Array | None = None,
    routes_BTk: Array | None = None, layout: MeshLayout = ONE,
) -> Callable:
    """mixture(x, weights, precision, fp8) -> its output; the routing is appended to `routings`."""

    def mixture(x: Array, w: Params, precision: Precision, fp8: bool) -> Array:
        y, routing = moe.moe_block(x, w, cfg.mixture, precision, fp8, live_BT, routes_BTk, layout)
        routings.append(routing)
        return y

    return mixture


def _saved(y: Array) -> Array:
    """A result that remat "mlp" keeps (transformer.SAVED)."""
    return checkpoint_name(y, "projections")
