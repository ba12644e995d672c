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
from jaxfp8rl.precision.four_bits import is_packed_leaf
from pallas_kernels import four_bits
from pallas_kernels.four_bits import FourBits

STORED = {"uint8": "U8", "int32": "I32", "int64": "I64", "float32": "F32", "bfloat16": "BF16",
          "float8_e4m3fn": "F8_E4M3"}  # the types by safetensors' names
_AGAIN = ("quantise it again, with one global scale for q, k and v, and one for gate and up: jaxfp8rl "
          "quantize does, from the BF16 checkpoint")
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
        return (Part(f"{stem}_packed", "int32", (n, k // 8), "packed"),
                Part(f"{stem}_scale", "bfloat16", scales, "scale"),
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
_global_scale, _values = jax.jit(four_bits.global_scale), jax.jit(four_bits.values)


def packed_tensors(cfg: ModelConfig, read: Callable[[Entry], Any]) -> Iterator[tuple[Entry, Any]]:
    """(entry, its weight) of every tensor of a model that `cfg.packed` describes, in HF order: a FourBits of
    the float weight that `read` gives, or what it gives. Raises ModelError for numbers that are not
    finite."""
    assert cfg.packed
    by_place = {(e.layer, ".".join(e.path[1:3])): e for e in param_table(cfg) if is_packed(e, cfg)}
    divisors: dict[tuple, Array] = {}
    for e in param_table(cfg):
        if not is_packed(e, cfg):
            yield e, read(e)
            continue
        weight = read(e)
        if not np.isfinite(np.asarray(weight, np.float32)).all():
            raise ModelError(f"{e.hf_name} has numbers that are not finite",
                             "quantise a checkpoint that is whole")
        key = e.layer, partners(e)
        if cfg.packed.form == "nvfp4" and key not in divisors:
            together = [by_place[e.layer, name] for name in key[1] if (e.layer, name) in by_place]
            divisors = {key: _global_scale(*map(read, together))}
        yield e, quantize(weight, form=cfg.packed.form, divisor=divisors.get(key))


def pack_params(cfg: ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    """A tree of float weights, layers stacked, with those in four bits that `cfg.packed` names."""
    assert cfg.packed
    layers = dict(params["layers"])
    at = lambda name: functools.reduce(lambda node, key: node[key], name.split("."),
                                       params["layers"])["weight"]
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
    odd = {".".join(e.path[1:3]): e.shape for e in param_table(cfg) if is_packed(e, cfg)
           and e.shape[1] % group}
    if odd:
        listing = ", ".join(f"{name} {list(shape)}" for name, shape in odd.items())
        raise ModelError(f"{cfg.packed.form} has groups of {group} along K, which do not divide {listing}",
                         'choose the format "nvfp4", whose groups are of 16' if group == 32
                         else "choose another model")


class PackedReader:
    """Takes the tensors of packed weights as they come, and makes of them a FourBits for each linear, its
    layers stacked. A model without packed weights has none to take.

    needed: the names that a checkpoint must have.
    """

    def __init__(self, cfg: ModelConfig, where: object):
        self._cfg, self._where = cfg, where
        entries = [e for e in param_table(cfg) if is_packed(e, cfg)]
        form = cfg.packed.form if cfg.packed else ""  # without a form nothing is packed
        self._parts = {part.name: (part, e) for e in entries for part in parts_of(e, form)}
        self.needed = [name for name, (part, _) in self._parts.items() if part.field]
        self._stacks: dict[tuple[str, ...], dict[str, np.ndarray]] = {}
        self._global: dict[str, float] = {}

    def checked(self, name: str, shape: tuple[int, ...], dtype: str, read: Callable[[], np.ndarray]) -> bool:
        """Whether a tensor is one of these. dtype: safetensors' name. Raises ModelError for another shape or
        type than the format has."""
        if name not in self._parts:
            return False
        part, _ = self._parts[name]
        shapes = {part.shape, ()} if part.shape == (1,) else {part.shape}
        if shape not in shapes or dtype != STORED[part.dtype]:
            raise ModelError(f"{self._where}: {name} is {dtype} {list(shape)}, config.json says "
                             f"{STORED[part.dtype]} "
                             f"{list(part.shape)}", "config.json and the weights belong to different models")
        if part.field == "global_scale":
            self._global[name] = float(read().reshape(()))
        return True

    def check_scales(self) -> None:
        """Raise ModelError for global scales that are not positive and finite, or, with the tensors listed,
        that differ among the parts of a fused product: an engine takes the largest for all, and vLLM only
        warns."""
        if odd := [name for name, x in self._global.items() if not 0 < x < np.inf]:
            raise ModelError(f"{self._where}: {odd[0]} is {self._global[odd[0]]}, which is no divisor",
                             _AGAIN)
        products: dict[tuple, list[str]] = {}
        for name in self._global:
            e = self._parts[name][1]
            products.setdefault((e.layer, partners(e)), []).append(name)
        bad = [names for names in products.values() if len({self._global[name] for name in names}) > 1]
        if bad:
            listing = "; ".join(", ".join(f"{name} = {self._global[name]:g}" for name in names)
                                for names in bad[:3])
            more = f"; and {len(bad) - 3} more products" if len(bad) > 3 else ""
            raise ModelError(f"{self._where}: parts of one product have different global scales, of which an "
                             f"engine uses the largest for all: {listing}{more}", _AGAIN)

    def take(self, name: str, read: Callable[[], np.ndarray]) -> None:
        """Copy a tensor, if it is one of these, into its place. Raises ModelError for scales that are not
        finite, or below 0."""
        part, entry = self._parts.get(name, (None, None))
        if part is None or entry is None or not part.field:
            return
        x = read()
        odd = (x == 255) if part.field == "scale" and x.dtype == np.uint8 else (
            ~(np.asarray(x, np.float32) >= 0) | ~np.isfinite(np.asarray(x, np.float32))
            if part.field == "scale" else False)
        if np.any(odd):
            raise ModelError(f"{self._where}: {name} has scales that are negative or not finite", _AGAIN)
        if part.field == "packed":
            x = x.view(np.uint8)
        elif part.field == "global_scale":
            x = x.reshape(())
        stack = self._stacks.setdefault(entry.path, {})
        if part.field not in stack:
            stack[part.field] = np.empty((self._cfg.num_hidden_layers, *x.shape), x.dtype)
        stack[part.field][entry.index] = x

    def into(self, params: dict[str, Any]) -> dict[str, Any]:
        """`params` with what was taken in the places of its Nones."""
        for path, stack in self._stacks.items():
            node = functools.reduce(lambda node, key: node[key], path[:-1], params)
            arrays: Any = stack  # of numpy until they are moved to a device
            node[path[-1]] = FourBits(**arrays)
        return params


def unpack_params(params: dict[str, Any]) -> dict[str, Any]:
    """The tree with the values of packed weights, float32, in their places."""
    return jax.tree.map(lambda w: _values(w) if is_packed_leaf(w) else w, params, is_leaf=is_packed_leaf)
