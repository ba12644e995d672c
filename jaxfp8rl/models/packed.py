"""Weights in four bits in a model's tree and in a checkpoint (pallas_kernels.four_bits).

A packed linear has three tensors, of compressed-tensors' names:

| format | weight_packed | weight_scale | and |
|---|---|---|---|
| nvfp4 | uint8 [N, K/2] | float8_e4m3fn [N, K/16] | weight_global_scale, float32 [1], one a fused product |
| mxfp4 | uint8 [N, K/2] | uint8 [N, K/32] | |
| int4 | int32 [N, K/8], the same bytes | bfloat16 [N, K/32] | weight_shape, int64 [2] |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, is_packed, param_table
from pallas_kernels import four_bits
from pallas_kernels.four_bits import FourBits

FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))


class Part(NamedTuple):
    """A tensor of a packed weight. field: of a FourBits, or "" for what tells nothing new."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    field: str


def parts_of(entry: Entry, form: str) -> tuple[Part, ...]:
    """The tensors of a packed weight, in the order in which they are written."""
    (n, k), stem = entry.shape, entry.hf_name
    scales = (n, k // four_bits.GROUPS[form])
    if form == "int4":
        return (Part(f"{stem}_packed", "int32", (n, k // 8), "packed"), Part(f"{stem}_scale", "bfloat16", scales, "scale"),
                Part(f"{stem}_shape", "int64", (2,), ""))
    packed = Part(f"{stem}_packed", "uint8", (n, k // 2), "packed")
    if form == "mxfp4":
        return packed, Part(f"{stem}_scale", "uint8", scales, "scale")
    return (packed, Part(f"{stem}_scale", "float8_e4m3fn", scales, "scale"),
            Part(f"{stem}_global_scale", "float32", (1,), "global_scale"))


def stored_parts(entry: Entry, weight: FourBits) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of a weight [N, K] as a checkpoint has it."""
    for part in parts_of(entry, weight.format):
        if not part.field:
            yield part.name, np.array(entry.shape, np.int64)
            continue
        x = np.ascontiguousarray(getattr(weight, part.field))
        yield part.name, x.view(np.int32) if part.dtype == "int32" else x.reshape(part.shape)


def partners(entry: Entry) -> tuple[str, ...]:
    """The linears that an engine multiplies as one with the entry's, its own among them."""
    own = ".".join(entry.path[1:3])
    return next((group for group in FUSED if own in group), (own,))


quantize = jax.jit(four_bits.quantize, static_argnames="form")
_global_scale = jax.jit(four_bits.global_scale)


def packed_tensors(cfg: ModelConfig, read: Callable[[Entry], Any]) -> Iterator[tuple[Entry, Any]]:
    """(entry, its weight) of every tensor of a model that `cfg.packed` describes, in HF order: a FourBits of
    the float weight that `read` gives, or what it gives. Raises ModelError for numbers that are not finite."""
    assert cfg.packed
    by_place = {(e.layer, ".".join(e.path[1:3])): e for e in param_table(cfg) if is_packed(e, cfg)}
    divisors: dict[tuple, Array] = {}
    for e in param_table(cfg):
        if not is_packed(e, cfg):
            yield e, read(e)
            continue
        weight = read(e)
        if not np.isfinite(np.asarray(weight, np.float32)).all():
            raise ModelError(f"{e.hf_name} has numbers that are not finite", "quantise a checkpoint that is whole")
        key = e.layer, partners(e)
        if cfg.packed.form == "nvfp4" and key not in divisors:
            together = [by_place[e.layer, name] for name in key[1] if (e.layer, name) in by_place]
            divisors = {key: _global_scale(*map(read, together))}
        yield e, quantize(weight, form=cfg.packed.form, divisor=divisors.get(key))


def pack_params(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """A tree of float weights, layers stacked, with those in four bits that `cfg.packed` names."""
    assert cfg.packed
    layers = dict(params["layers"])
    at = lambda name: functools.reduce(lambda node, key: node[key], name.split("."), params["layers"])["weight"]
    for name in cfg.packed.linears:
        part, module = name.split(".")
        group = next((group for group in FUSED if name in group), (name,))
        divisor = None
        if cfg.packed.form == "nvfp4":
            divisor = four_bits.global_scale(*(at(n) for n in group if n in cfg.packed.linears))
        weight = four_bits.quantize(at(name), cfg.packed.form, divisor)
        layers[part] = {**layers[part], module: {**layers[part][module], "weight": weight}}
    return {**params, "layers": layers}


def check_packable(cfg: ModelConfig) -> None:
    """Raise ModelError for a model whose shapes four bits do not suit, naming the linears."""
    assert cfg.packed
    if cfg.experts:
        raise ModelError(f"{cfg.architecture}: experts in four bits are not written", "take a dense model")
    group = four_bits.GROUPS[cfg.packed.form]
    odd = {".".join(e.path[1:3]): e.shape for e in param_table(cfg) if is_packed(e, cfg) and e.shape[1] % group}
    if odd:
        listing = ", ".join(f"{name} {list(shape)}" for name, shape in odd.items())
        raise ModelError(f"{cfg.packed.form} has groups of {group} along K, which do not divide {listing}",
                         'choose the format "nvfp4", whose groups are of 16' if group == 32 else "choose another model")


def check_fused(cfg: ModelConfig, global_scale: Callable[[Entry], float], where: object) -> None:
    """Raise ModelError, with the tensors listed, if parts of a fused product have different global scales: an
    engine takes the largest for all, and vLLM only warns."""
    seen: dict[tuple, list[tuple[str, float]]] = {}
    for e in param_table(cfg):
        if is_packed(e, cfg):
            seen.setdefault((e.layer, partners(e)), []).append((f"{e.hf_name}_global_scale", global_scale(e)))
    bad = [group for group in seen.values() if len({scale for _, scale in group}) > 1]
    if bad:
        listing = "; ".join(", ".join(f"{name} = {scale:g}" for name, scale in group) for group in bad[:3])
        more = f"; and {len(bad) - 3} more products" if len(bad) > 3 else ""
        raise ModelError(
            f"{where}: parts of one product have different global scales, of which an engine uses the largest for all: "
            f"{listing}{more}", "quantise it again with one for q, k and v, and one for gate and up: "
            "jaxfp8rl quantize does, from the BF16 checkpoint")
