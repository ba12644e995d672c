"""A decoder layer of a token a row by as few kernels as there are: FP8 weights and activations on Hopper.

It computes what `DecoderLayer` does, with the same roundings. Where that has a sum, a norm and a quantiser,
here is one kernel; q, k and v are one product of weights that lie apart, and so are gate and up. A layer
hands on its residual stream as two terms, the last of which the next norm adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxfp8rl.models import layers as nn
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.families import Activation, Norms
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.linear import backend_of, quantize_rows
from jaxfp8rl.precision.records import EngineRounding, Precision, Products
from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.few_rows import api as few
from pallas_kernels.quantize import BLOCK

Params = dict[str, Any]
NORMS = Norms()
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LINEARS = {*QKV, *GATE_UP, "o_proj", "down_proj"}
# Equal calls share a kernel: see precision/linear.py.
add_norm_quantize = jax.jit(few.add_norm_quantize, static_argnames=("eps", "amax_floor", "backend"))
swiglu_quantize = jax.jit(few.swiglu_quantize, static_argnames=("amax_floor", "backend"))
matmul_beside = jax.jit(matmul.matmul_beside, static_argnames=("backend",))


def takes(cfg: ModelConfig, precision: Precision, run: LayerRun, rows: int) -> bool:
    """Whether `layer` computes the layers of this run for so many rows."""
    return not why_not(cfg, precision, run, rows)


def why_not(cfg: ModelConfig, precision: Precision, run: LayerRun, rows: int) -> str:
    """Why `layer` does not compute the layers of this run for so many rows; "" if it does."""
    family, plain = cfg.family, EngineRounding(precision.rounding.rope_dtype, precision.rounding.router_dtype,
                                               precision.rounding.logits_dtype,
                                               amax_floor=precision.rounding.amax_floor)
    odd = [n for n in (cfg.hidden_size, cfg.intermediate_size) if n % few.WIDTH]
    odd += [n for n in (cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim)
            if n % BLOCK]
    reasons = {
        "a mixture of experts": run.sparse,
        "low-rank adapters": precision.adapters is not None,
        f"not in FP8: {', '.join(sorted(LINEARS - run.fp8))}": not run.fp8 >= LINEARS,
        f'products by "{precision.products}"': precision.products != Products.PALLAS,
        f"activations in {precision.compute_dtype}": not precision.activations_fp8,
        f"computed in {precision.compute_dtype}": precision.compute_dtype != "bfloat16",
        "an engine's roundings": precision.rounding != plain,
        f"the norms or activation of {cfg.architecture}":
            family.norms != NORMS or family.activation != Activation.SILU or family.unit_offset,
        f"the biases of {cfg.architecture}": family.qkv_bias,
        f"widths of {', '.join(map(str, odd))}": odd,
        f"{rows} rows, which 8 does not divide": rows % 8,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def with_scales(weights: Params) -> Params:
    """The weights of a layer or of a stack of them, and beside them the scales of those that are multiplied
    as one."""
    joined = lambda part, names: jnp.concatenate([weights[part][n]["weight"].scale for n in names], -2)
    return {**weights, "scales": {"qkv": joined("self_attn", QKV), "gate_up": joined("mlp", GATE_UP)}}


def split_heads(cfg: ModelConfig, rope: tuple[Array, Array], qkv: Array,
                w: Params) -> tuple[Array, Array, Array]:
    """qkv [B, H + 2K, d] -> q [B, 1, H, d] and k [B, 1, K, d], normed and rotated, and v. w: of attention."""
    ends = cfg.num_attention_heads, cfg.num_attention_heads + cfg.num_key_value_heads
    q, k, v = jnp.split(qkv[:, None], ends, axis=2)
    weight = lambda norm: w[norm]["weight"] if cfg.family.qk_norm else None
    rotated = lambda heads, norm: nn.apply_rope(heads, *rope, weight(norm), cfg.rms_norm_eps)
    return rotated(q, "q_norm"), rotated(k, "k_norm"), v


def rotate_and_write(cfg: ModelConfig, rope: tuple[Array, Array], qkv: Array, at: Array, k_cache: Array,
                     v_cache: Array,
                     w: Params) -> tuple[Array, Array, Array]:
    """`split_heads` in one kernel with the write of keys and values to the slots at [B] of the caches [S, K,
    d]: q [B, H, d] and the caches."""
    # a slice of a stack that XLA fused with the kernel would hide that its caches are written in place
    norms = jax.lax.optimization_barrier(norms_of(cfg, qkv, w))
    cos, sin = (x[:, 0, 0] for x in rope)
    return few.rotate_and_write(qkv, cos, sin, at, k_cache, v_cache, *norms, eps=cfg.rms_norm_eps,
                                backend="pallas")


def rotate(cfg: ModelConfig, rope: tuple[Array, Array], qkv: Array, dtype: DTypeLike,
           w: Params) -> tuple[Array, Array, Array]:
    """The same, with keys and values [B, K, d] as results of this type."""
    cos, sin = (x[:, 0, 0] for x in rope)
    return few.rotate(qkv, cos, sin, cfg.num_key_value_heads, jnp.dtype(dtype), *norms_of(cfg, qkv, w),
                      eps=cfg.rms_norm_eps, backend="pallas")


def norms_of(cfg: ModelConfig, qkv: Array, w: Params) -> list[Array]:
    """The weights of the norms of queries and keys, as `few.rotate_and_write` takes them."""
    names = ("q_norm", "k_norm") if cfg.family.qk_norm else ()
    return [w[n]["weight"].astype(qkv.dtype).astype(jnp.float32) for n in names]


def apart(cfg: ModelConfig, rope: tuple[Array, Array], attend: Callable) -> Callable:
    """`attend` of a DecoderLayer, as `layer` takes it."""
    def heads(qkv: Array, w: Params, amax_floor: float) -> tuple[Array, Any]:
        del amax_floor  # nothing is quantised here
        return attend(*split_heads(cfg, rope, qkv, w))

    return heads


def layer(cfg: ModelConfig, precision: Precision, attend: Callable, x: Array, y: Array,
          w: Params) -> tuple[Array, Array, Any]:
    """The residual stream x + y, [B, D] bfloat16 each, after a layer, likewise as two terms; and the second
    result of attend(qkv [B, H + 2K, d], weights, amax_floor) -> (o of B * H * d, or its codes and scales,
    anything), which norms and rotates the heads. w: of `with_scales`."""
    backend, attention, mlp = backend_of(precision), w["self_attn"], w["mlp"]
    floor, eps = precision.rounding.amax_floor, cfg.rms_norm_eps

    def normed(x: Array, y: Array, name: str) -> tuple[Array, tuple[Array, Array]]:
        weight = w[name]["weight"].astype(x.dtype)
        return add_norm_quantize(x, y, weight, eps=eps, amax_floor=floor, backend=backend)

    def product(x: Any, part: Params, names: tuple[str, ...], scales: Array | None = None) -> Array:
        """x: codes [B, K] and scales [K/128, B]."""
        weights: list[QuantizedWeight] = [part[name]["weight"] for name in names]
        return matmul_beside(*x, tuple(q.codes for q in weights),
                             weights[0].scale if scales is None else scales,
                             backend=backend)

    def quantized(o: Array) -> tuple[Array, Array]:
        codes, scale = quantize_rows(o.reshape(len(x), -1), amax_floor=floor, backend=backend)
        return codes, scale.T

    x, h = normed(x, y, NORMS.before_attention)
    qkv = product(h, attention, QKV, w["scales"]["qkv"]).reshape(len(x), -1, cfg.head_dim)
    o, left = attend(qkv, attention, amax_floor=floor)
    y = product(o if isinstance(o, tuple) else quantized(o), attention, ("o_proj",))
    x, h = normed(x, y, NORMS.before_mlp)
    h = swiglu_quantize(product(h, mlp, GATE_UP, w["scales"]["gate_up"]), amax_floor=floor, backend=backend)
    return x, product(h, mlp, ("down_proj",)), left
