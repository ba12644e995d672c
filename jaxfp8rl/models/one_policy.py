"""A decoder layer whose bits are the same in the embedded engine and in the learner (precision.exact =
"engine").

The engine decodes a token a row and computes prompts packed; the learner computes whole packed sequences.
Here each token's result is a function of its own sequence up to it, bit for bit, whoever computes it and
beside whatever:

- on Hopper, all three take the kernels of `few_rows`, whose sums go by a row alone, and attend to keys in the
  order of the kernel for paged caches (`pallas_kernels.decode_attention.packed`);
- on a CPU, what a layer does to a token, norms, products, quantisers and the MLP, is computed for blocks of 8
  tokens (`pallas_kernels.rows`), so that XLA always compiles the same products and sums, and attention by a
  reference in that order (`ordered`).

The learner's gradient is that of the plain layer at the same input (`jaxfp8rl.precision.exact`).

Letters: N tokens, D width, H query heads, K key-value heads, d head size; B rows of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from jax import Array

from jaxfp8rl.models import few_rows
from jaxfp8rl.models import layers as nn
from jaxfp8rl.models.config import LayerKind, ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer, Params, mixture_of
from jaxfp8rl.models.kv_cache import KVCache, by_kind, in_cache, store, whole, written
from jaxfp8rl.precision.exact import constant
from jaxfp8rl.precision.kv_scales import UNIT, KvScales
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import AttentionBackend, Precision
from pallas_kernels.decode_attention import ordered
from pallas_kernels.decode_attention import packed as packed_by_tiles
from pallas_kernels.few_rows import api as few
from pallas_kernels.rows import by_rows

Rope = tuple[Array, Array]


class Attention(NamedTuple):
    """Attention of tokens. rope: of `rope_of`. attend(q [N, H, d], k, v [N, K, d]) -> (o [N, H, d],
    anything). heads: as `few_rows.layer` attends."""

    rope: Rope
    attend: Callable
    heads: Callable | None = None


def by_kernels(precision: Precision) -> bool:
    return precision.attention == AttentionBackend.PALLAS


def layer(cfg: ModelConfig, precision: Precision, run: LayerRun, x: Array, w: Params, attention: Attention,
          routes: Array | None = None) -> tuple[Array, Any, Array | None]:
    """x [N, D] after a layer with the weights w; what its attention gives beside o; and the experts [N, k] of
    a sparse layer, None of others. routes [N, k]: the experts to take in place of the router's choice. Raises
    ValueError for a layer that the kernels do not compute, where there are kernels."""
    if by_kernels(precision):
        if not few_rows.takes(cfg, precision, run, len(x)):
            raise ValueError(f"{len(x)} tokens of layers {run.start} to {run.stop}: an exact layer on a GPU "
                             "is dense, in FP8 with FP8 activations, and its tokens are a multiple of 8 "
                             "(few_rows.takes)")
        a, b, left = few_rows.layer(cfg, precision, cast(Callable, attention.heads), x, jnp.zeros_like(x),
                                    few_rows.with_scales(w))
        return a + b, left, None
    norms, w_attention, rope = cfg.family.norms, w["self_attn"], attention.rope

    def before(x: Array, rope: Rope) -> tuple[Array, ...]:
        d = DecoderLayer(cfg, precision, run, rope, attention.attend)
        h = d.norm(x[:, None], w[norms.before_attention], reader="q_proj")
        q, k, v = (d._heads(y) for y in d.linears(h, w_attention, "q_proj", "k_proj", "v_proj"))
        return tuple(y[:, 0] for y in (d._rotated(q, w_attention, "q_norm"),
                                       d._rotated(k, w_attention, "k_norm"), v))

    def after(x: Array, o: Array, routes: Array | None) -> tuple[Array, Array | None]:
        routings = []
        mixture = mixture_of(cfg, routings, None, None if routes is None else routes[:, None])
        d = DecoderLayer(cfg, precision, run, rope, attention.attend, mixture=mixture)
        (y,) = d.linears(o.reshape(len(o), 1, -1), w_attention, "o_proj")
        x = cast(Array, d._add(x[:, None], y, w, norms.after_attention))
        x = cast(Array, d._add(x, d.mlp(d.norm(x, w[norms.before_mlp], reader="gate_proj"), w), w,
                               norms.after_mlp))
        return x[:, 0], routings[0].ids[:, 0] if routings else None

    q, k, v = by_rows(before, x, rope)
    o, left = attention.attend(q, k, v)
    x, ids = by_rows(after, x, o, routes)
    return x, left, ids


def final_norm(x: Array, norm: Callable, weight: Array, eps: float, precision: Precision) -> Array:
    """norm(x [N, 1, D]), the norm after the last layer, of x [..., D]; by kernels `few_rows.rms_norm`."""
    flat = x.reshape(-1, x.shape[-1])
    normed = (few.rms_norm(flat, weight.astype(x.dtype), eps, backend="pallas") if by_kernels(precision)
              else by_rows(lambda x: norm(x[:, None])[:, 0], flat))
    return normed.reshape(x.shape)


def packed(positions_BT: Array, segment_ids_BT: Array, cfg: ModelConfig, precision: Precision) -> Callable:
    """choose(kind, scales) -> Attention of packed rows, of all B * T tokens; beside o it gives the keys and
    values [N, K, d] as a cache holds them. Positions count from 0 in each segment; padding gets 0."""
    positions, live = positions_BT.reshape(-1), segment_ids_BT.reshape(-1) > 0
    longest = segment_ids_BT.shape[1]
    lengths = jnp.where(live, positions + 1, 0).astype(jnp.int32)
    dtype = jnp.float8_e4m3fn if precision.kv.fp8 else jnp.dtype(precision.compute_dtype)
    backend = "pallas" if by_kernels(precision) else "reference"
    windowed = any(kind.window_within(longest) for kind in cfg.kinds)

    def make(kind: LayerKind) -> tuple:
        window = jnp.int32(kind.window_within(longest) or longest) if windowed else None
        return rope_of(positions, kind, cfg, precision), window

    chosen = by_kind(cfg, make)

    def choose(kind: Array | None, scales: KvScales) -> Attention:
        rope, window = chosen(kind)

        def attend_stored(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            return packed_by_tiles.attention(
                q, k, v, lengths, *by_head(scales, k), longest=min(precision.exact, longest),
                scale=cfg.attention_scale,
                window=window, backend=backend), (k, v)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            return attend_stored(q, *(in_cache(x, scales[n], dtype) for n, x in (("k", k), ("v", v))))

        def heads(qkv: Array, w: Params, amax_floor: float) -> tuple[Array, tuple[Array, Array]]:
            del amax_floor  # nothing is quantised here
            if whole(scales, dtype) and few.rotates(qkv, cfg.num_attention_heads, cfg.num_key_value_heads):
                return attend_stored(*few_rows.rotate(cfg, rope, qkv, dtype, w))
            q, k, v = (x[:, 0] for x in few_rows.split_heads(cfg, rope, qkv, w))
            return attend(q, k, v)

        return Attention(rope, attend, heads)

    return choose


def of_learner(cfg: ModelConfig, precision: Precision, run: LayerRun, x: Any, w: Params, choose: Callable,
               kind: Array | None, routes: Array | None) -> tuple[Array, Array | None]:
    """(x [B, T, D] after a layer, the experts [B, T, k] that it took, or None), without derivatives. choose:
    of `packed`."""
    x, w = constant((x, w))
    flat = None if routes is None else routes.reshape(-1, routes.shape[-1])
    attention = choose(kind, w.get("kv_scales") or UNIT)
    made, _, ids = layer(cfg, precision, run, x.reshape(-1, x.shape[-1]), w, attention, flat)
    return made.reshape(x.shape), None if ids is None else ids.reshape(*x.shape[:2], -1)


def prefilled(positions_BT: Array, segment_ids_BT: Array, places: tuple[Array, Array], cfg: ModelConfig,
              precision: Precision) -> Callable:
    """attention(kind, cache, layer, scales) -> Attention of packed prompts, which gives the cache with their
    keys and values at their places."""
    choose = packed(positions_BT, segment_ids_BT, cfg, precision)

    def attention(kind: Array | None, cache: KVCache, layer: Array, scales: KvScales) -> Attention:
        found = choose(kind, scales)

        def writing(attend: Callable) -> Callable:
            def attend_and_write(*args: Any, **more: Any) -> tuple[Array, KVCache]:
                o, stored = attend(*args, **more)
                k, v = (store(into, layer, places, x.reshape(*positions_BT.shape, *x.shape[1:]))
                        for into, x in zip((cache.k, cache.v), stored))
                return o, cache._replace(k=k, v=v)

            return attend_and_write

        return Attention(found.rope, *(writing(cast(Callable, f)) for f in found[1:]))

    return attention


def decoded(positions_BT: Array, cache: KVCache, places: tuple[Array, Array], cfg: ModelConfig,
            precision: Precision) -> Callable:
    """`prefilled` of new tokens [B, T] that write their places of the cache and then see the slots up to
    their own. On a CPU; the kernels are those of kv_cache.PagedStep."""
    _, pages, page, K, d = cache.k.shape
    table = jnp.repeat(cast(Array, cache.table), positions_BT.shape[1], 0)
    positions, length = positions_BT.reshape(-1), table.shape[1] * page
    lengths = jnp.minimum(positions + 1, length).astype(jnp.int32)

    def make(kind: LayerKind) -> tuple:
        window = kind.window_within(length) or length
        return rope_of(positions, kind, cfg, precision), jnp.maximum(lengths - window, 0)

    choose = by_kind(cfg, make)

    def attention(kind: Array | None, cache: KVCache, layer: Array, scales: KvScales) -> Attention:
        rope, starts = choose(kind)

        def slots(table: Array, at: Array) -> Array:
            found = jnp.take_along_axis(table, at // page, 1, mode="clip")
            return (layer * pages + jnp.minimum(found, pages - 1)) * page + at % page

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
            k, v = (x.reshape(*positions_BT.shape, K, d) for x in (k, v))
            into = written(cache, layer, places, k, v, scales)
            keys, values = (x.reshape(-1, K, d) for x in (into.k, into.v))
            k_scale, v_scale = by_head(scales, keys)
            return ordered.attention(q, keys, values, lengths, slots, table, k_scale, v_scale,
                                     cfg.attention_scale,
                                     starts), into

        return Attention(rope, attend)

    return attention


def rope_of(positions: Array, kind: LayerKind, cfg: ModelConfig, precision: Precision) -> Rope:
    """Cosines and sines [N, 1, 1, d/2] of positions [N]."""
    tables = lambda at: nn.rope_tables(at[:, None], kind.rope, cfg.head_dim, precision.rounding.rope_dtype)
    return tables(positions) if by_kernels(precision) else by_rows(tables, positions)


def by_head(scales: KvScales, k: Array) -> tuple[Array, ...]:
    """The scales of keys and of values for each of the heads of k [S, K, d]; 1 where the cache is not FP8."""
    fp8, heads = k.dtype == jnp.float8_e4m3fn, k.shape[1]
    return tuple(jnp.full(heads, scales[n] if fp8 else 1.0, jnp.float32) for n in ("k", "v"))
