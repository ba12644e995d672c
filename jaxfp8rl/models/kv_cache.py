"""The cache of keys and values in pages, and a decoding step's attention to it by kernels.

Letters as in models/transformer.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxfp8rl.models import few_rows
from jaxfp8rl.models import layers as nn
from jaxfp8rl.models.config import LayerKind, ModelConfig
from jaxfp8rl.precision.kv_scales import UNIT, KvScales
from jaxfp8rl.precision.records import AttentionBackend, Precision
from pallas_kernels.decode_attention import api as paged
from pallas_kernels.few_rows import api as few

Params = dict[str, Any]


class KVCache(NamedTuple):
    """Keys and values in pages, k and v [L, pages, page, K, d], and of sparse layers the experts, routes
    [sparse layers, pages, page, k] (jaxfp8rl.models.moe). Position p of row b lies in slot p % page of the
    page table[b, p // page], [B, M] int32. What would lie in a page that is none is dropped."""

    k: Array
    v: Array
    routes: Array | None = None
    table: Array | None = None


class PagedStep:
    """Attention of one token a row by the kernel for paged caches. What layers share is made once.

    step(kind, cache, layer, scales) -> (rope, attend), as a DecoderLayer takes them: attend(q [B, 1, H, d],
    k, v [B, 1, K, d]) -> (o [B, 1, H, d], the cache with k and v).
    """

    def __init__(self, positions_BT: Array, cache: KVCache, cfg: ModelConfig, precision: Precision,
                 places: tuple[Array, Array]):
        L, pages, page, K, d = cache.k.shape
        self.cfg, self.places = cfg, places
        self.stored = jax.ShapeDtypeStruct((L * pages, page, K, d), cache.k.dtype)
        self.table = jnp.minimum(cast(Array, cache.table), pages - 1).astype(jnp.int32)
        length = self.table.shape[1] * page
        self.lengths = jnp.minimum(positions_BT[:, 0] + 1, length).astype(jnp.int32)
        self.like = jax.ShapeDtypeStruct((len(self.table), cfg.num_attention_heads, d),
                                         jnp.dtype(precision.compute_dtype))

        def make(kind: LayerKind) -> tuple:
            rope = nn.rope_tables(positions_BT, kind.rope, d, precision.rounding.rope_dtype)
            window = _window_of(kind, cfg, length)
            return rope, window, paged.deal_of(self.like, self.stored, self.lengths, window)

        self.shared = by_kind(cfg, make)

    def __call__(self, kind: Array | None, cache: KVCache, layer: Array, scales: KvScales) -> tuple:
        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
            into = written(cache, layer, self.places, k, v, scales)
            return self._read(kind, into, layer, scales, q[:, 0])[:, None], into

        return self.shared(kind)[0], attend

    def heads(self, kind: Array | None, cache: KVCache, layer: Array, scales: KvScales, qkv: Array, w: Params,
              amax_floor: float) -> tuple[Any, KVCache]:
        """As `few_rows.layer` attends."""
        if self._whole(cache, scales) and few.rotates(qkv, self.cfg.num_attention_heads,
                                                      self.cfg.num_key_value_heads):
            q, cache = self._rotated(kind, cache, layer, qkv, w)
        else:
            q, k, v = few_rows.split_heads(self.cfg, self.shared(kind)[0], qkv, w)
            q, cache = q[:, 0], written(cache, layer, self.places, k, v, scales)
        floor = amax_floor if paged.quantizes(self.like, self.stored) else None
        return self._read(kind, cache, layer, scales, q, floor), cache

    def _rotated(self, kind: Array | None, cache: KVCache, layer: Array, qkv: Array,
                 w: Params) -> tuple[Array, KVCache]:
        (page, slot), (_, pages, size, K, d) = self.places, cache.k.shape
        at = jnp.where(page < pages, (layer * pages + page) * size + slot, -1)[:, 0].astype(jnp.int32)
        k, v = (x.reshape(-1, K, d) for x in (cache.k, cache.v))
        q, k, v = few_rows.rotate_and_write(self.cfg, self.shared(kind)[0], qkv, at, k, v, w)
        return q, cache._replace(k=k.reshape(cache.k.shape), v=v.reshape(cache.v.shape))

    def _read(self, kind: Array | None, cache: KVCache, layer: Array, scales: KvScales, q: Array,
              amax_floor: float | None = None) -> Any:
        """q [B, H, d] -> o [B, H, d], or with an amax_floor its codes and scales."""
        _, window, dealt = self.shared(kind)
        k_scale, v_scale = (None if self._whole(cache, scales) else
                            jnp.full(cache.k.shape[3], scales[n], jnp.float32) for n in ("k", "v"))
        k, v = (x.reshape(self.stored.shape) for x in (cache.k, cache.v))
        operands = q, k, v, self.table, self.lengths, k_scale, v_scale
        how: dict[str, Any] = dict(window=window, scale=self.cfg.attention_scale, dealt=dealt,
                                   first_page=layer * cache.k.shape[1], backend="pallas")
        if amax_floor is None:
            return paged.decode_attention(*operands, **how)
        return paged.attention_quantize(*operands, amax_floor=amax_floor, **how)

    def _whole(self, cache: KVCache, scales: KvScales) -> bool:
        return whole(scales, cache.k.dtype)


def by_kind(cfg: ModelConfig, make: Callable[[LayerKind], Any]) -> Callable[[Array | None], Any]:
    """choose(kind) -> make(kind), arrays made once for each kind of layers; `kind` as of `kinds_of`."""
    made = [make(kind) for kind in cfg.kinds]
    if len(made) == 1:
        return lambda kind: made[0]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *made)
    return lambda kind: jax.tree.map(operator.itemgetter(kind), stacked)


def places_of(cache: KVCache, positions_BT: Array) -> tuple[Array, Array]:
    """The pages and slots of positions, [B, T] each. Past the end of the table the page is none."""
    pages, page = cache.k.shape[1:3]
    found = jnp.take_along_axis(cast(Array, cache.table), positions_BT // page, 1, mode="fill",
                                fill_value=pages)
    return found, positions_BT % page


def _window_of(kind: LayerKind, cfg: ModelConfig, length: int) -> Array | None:
    """The number of slots that a token sees in layers of this kind; None where it sees all in every layer."""
    if not any(k.window_within(length) for k in cfg.kinds):
        return None
    return jnp.int32(kind.window_within(length) or length)


def decodes_by_kernel(cfg: ModelConfig, precision: Precision) -> bool:
    """Whether one new token a row attends to the cache by the kernel for paged caches. It has no FP8
    attention, and not every size of heads."""
    return (precision.attention == AttentionBackend.PALLAS and not precision.kv.attention_fp8
            and cfg.head_dim in paged.HEAD_SIZES)


def written(cache: KVCache, layer: Array, places: tuple[Array, Array], k: Array, v: Array,
             scales: KvScales) -> KVCache:
    """The cache with k, v [B, T, K, d] at their places, over their scales where it is FP8."""
    at = lambda into, x, scale: store(into, layer, places, in_cache(x, scale, into.dtype))
    return cache._replace(k=at(cache.k, k, scales["k"]), v=at(cache.v, v, scales["v"]))


def whole(scales: KvScales, dtype: DTypeLike) -> bool:
    """Whether a cache of this type holds keys and values as they are, not over scales."""
    return scales is UNIT or jnp.dtype(dtype) != jnp.float8_e4m3fn


def in_cache(x: Array, scale: Array | float, dtype: DTypeLike) -> Array:
    """Keys or values as a cache of this type holds them: in E4M3 over their scale."""
    fp8 = jnp.dtype(dtype) == jnp.float8_e4m3fn
    return nn.to_e4m3(x / jnp.asarray(scale, x.dtype)) if fp8 else x.astype(dtype)


def store(into: Array, layer: Array, places: tuple[Array, Array], x: Array) -> Array:
    """x [B, T, ...] at its places in `into` [L, pages, page, ...]."""
    return into.at[layer, *places].set(x, mode="drop")
