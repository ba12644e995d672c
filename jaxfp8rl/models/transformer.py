"""A decoder as pure functions over a parameter tree (models/module.py makes one).

The tree mirrors Hugging Face names, with the layers stacked along a leading axis L so that one `scan` runs
them: `{"embed_tokens": {"weight" [V, D]}, "layers": {"self_attn": {"q_proj": {"weight" [L, N, K]}, ...},
...}, "norm", ...}`. In a mixture of experts "moe" stands beside "mlp": a stack has rows for those layers
alone that have such a tensor. `params["layers"]` may also be a tuple of such dicts, one for each run of equal
precision (`split_layers`), and `params` may hold "kv_scales" for FP8 attention (`precision/kv_scales.py`).

Letters: B rows, T tokens, S keys, D width, F hidden, H query heads, K key-value heads, d head size, V
vocabulary, L layers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxfp8rl.distributed.mesh import ONE, MeshLayout
from jaxfp8rl.microbatch import accumulate_grad, start_backward
from jaxfp8rl.models import few_rows, moe, one_policy
from jaxfp8rl.models import layers as nn
from jaxfp8rl.models.config import LayerKind, ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer, Params, Residual, mixture_of
from jaxfp8rl.models.kv_cache import (
    KVCache,
    PagedStep,
    by_kind,
    decodes_by_kernel,
    places_of,
    store,
    written,
)
from jaxfp8rl.precision.exact import constant, with_gradient_of
from jaxfp8rl.precision.kv_scales import UNIT, KvScales, amax_of
from jaxfp8rl.precision.layer_runs import LayerRun, first_row, rows_of
from jaxfp8rl.precision.records import AttentionBackend, Precision
from jaxfp8rl.precision.weights import grad_slots_of, trainable
from pallas_kernels.attention import api as packed

Remat = Literal["none", "layer", "products", "mlp"]
# By what the backward pass computes again of a layer: what is kept for it besides the layer's input.
# "attention" is its result with the logarithms of its sums, "projections" the results of q, k, v and o_proj,
# "statistics" a number a norm and token.
SAVED = {"layer": (), "products": ("attention", "statistics"),
         "mlp": ("attention", "projections", "statistics")}
PAGE, SMALL_PAGE = 64, 16  # slots of a page of the cache, and of one for short rows


def forward(
    params: Params, cfg: ModelConfig, tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array,
    precision: Precision, remat: Remat = "none", layout: MeshLayout = ONE, ends_BT: Array | None = None,
) -> Array:
    """Hidden states [B, T, D] after the final norm, in `precision.compute_dtype`.

    Rows are packed: token t sees the tokens s <= t of its own segment; segment 0 is padding. `positions_BT`
    counts from 0 in each segment. `ends_BT`: those of rows with shared prefixes
    (TrainBatch). `remat`: what of a layer the backward pass computes again (SAVED).
    `layout`: where it is of several devices, `params` are a device's shards (jaxfp8rl.distributed.mesh).
    Gradients of layers are added to `params["sums"]` if there are any (jaxfp8rl.microbatch).
    """
    return forward_and_amax(params, cfg, tokens_BT, positions_BT, segment_ids_BT, precision, remat, layout,
                            ends_BT)[0]


def forward_and_amax(
    params: Params, cfg: ModelConfig, tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array,
    precision: Precision, remat: Remat = "none", layout: MeshLayout = ONE, ends_BT: Array | None = None,
) -> tuple[Array, KvScales]:
    """`forward`, and the largest query, key and value of each layer over the tokens that are no padding, [L]
    float32."""
    return forward_with_aux(params, cfg, tokens_BT, positions_BT, segment_ids_BT, precision, remat,
                            layout, ends_BT=ends_BT)[:2]


def forward_with_aux(
    params: Params, cfg: ModelConfig, tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array,
    precision: Precision, remat: Remat = "none", layout: MeshLayout = ONE,
    routes: Array | None = None, ends_BT: Array | None = None,
) -> tuple[Array, KvScales, moe.Routing | None]:
    """`forward_and_amax`, and what the routers of sparse layers said, stacked (None if there are none).
    `routes` [B, T, sparse layers, k]: the experts to take in place of the routers' choice."""
    attention = packed_attention(positions_BT, segment_ids_BT, cfg, precision, ends_BT)
    embedding = {"embed_tokens": layout.gather(params["embed_tokens"])}
    x, seen = embed(embedding, tokens_BT, cfg, precision, layout), []
    sums, live = params.get("sums", {}), segment_ids_BT > 0
    exactly = one_policy.packed(positions_BT, segment_ids_BT, cfg, precision) if precision.exact else None
    for run, weights in runs_of(params, cfg, precision):

        @functools.partial(_rematerialised, remat=remat)
        def layer(x: Residual, w: Params, kind: Array | None, routes: Array | None,
                  run: LayerRun = run) -> tuple[Residual, tuple]:
            (rope, attend), routings, w = attention(kind), [], layout.gather(w)
            attend, exact = functools.partial(attend, scales=w.get("kv_scales")), None
            if exactly:
                exact, routes = one_policy.of_learner(cfg, precision, run, x, w, exactly, kind, routes)
            mixture = mixture_of(cfg, routings, live, routes, layout)
            compute = DecoderLayer(cfg, precision, run, rope, attend, mixture=mixture, layout=layout)
            x, amax = compute(x, w)
            return x if exact is None else with_gradient_of(exact, x), (amax, *routings)

        def body(carry: Any, at: tuple, layer: Callable = layer, run: LayerRun = run) -> tuple:
            (x, sums), (i, w, kind, routes) = carry, at
            for name in [name for name in sums if name in w]:
                row = i - run.start + first_row(run, precision.runs, name)
                grad_slots, own = accumulate_grad(grad_slots_of(w[name], precision.compute_dtype), sums[name],
                                                  row)
                w, sums = w | trainable(w, {name: grad_slots}), sums | {name: own}
            x, aux = layer(x, w, kind, routes)
            return (nn.shared_cotangent(x), sums), aux

        replayed = None if routes is None or not run.sparse else jnp.moveaxis(routes, 2, 0)[
            rows_of(run, precision.runs, "moe")]
        steps = jnp.arange(run.start, run.stop), weights, kinds_of(cfg, run), replayed
        (x, sums), aux = jax.lax.scan(body, (x, sums), steps)
        seen.append(aux)
    x = start_backward(x, sums)
    exact = _exact_final_norm(jax.lax.stop_gradient(x), params, cfg, precision) if exactly else None
    x = final_norm(x, params, cfg, precision)
    x = x if exact is None else with_gradient_of(exact, x)
    join = lambda parts: jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    routings = [routing for _, *routings in seen for routing in routings]
    return x, join([amax for amax, *_ in seen]), join(routings) if routings else None


def _rematerialised(layer: Callable, remat: Remat) -> Callable:
    if remat == "none":
        return layer
    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*SAVED[remat]))


def kinds_of(cfg: ModelConfig, run: LayerRun) -> Array | None:
    """The index into `cfg.kinds` of each layer of a run, int32; None where all layers are of one kind."""
    if len(cfg.kinds) == 1:
        return None
    return jnp.asarray([cfg.kinds.index(kind) for kind in cfg.layer_kinds[run.start : run.stop]], jnp.int32)


def packed_attention(positions_BT: Array, segment_ids_BT: Array, cfg: ModelConfig,
                     precision: Precision, ends_BT: Array | None = None) -> Callable:
    """attention(kind) -> (rope, attend), as a DecoderLayer of that kind (`kinds_of`) takes them.

    attend(q [B, T, H, d], k, v [B, T, K, d], scales=None) -> (o [B, T, H, d], the largest of q, k and v):
    within segments and windows, keys and values rounded as the engine's cache holds them, over their scales,
    1 if None.
    """
    by_kernels, rounded = precision.attention == AttentionBackend.PALLAS, precision.kv

    def make(kind: LayerKind) -> tuple:
        rope = nn.rope_tables(positions_BT, kind.rope, cfg.head_dim, precision.rounding.rope_dtype)
        window = kind.window_within(segment_ids_BT.shape[1])
        return rope, (packed.tables_of if by_kernels else nn.attention_mask)(segment_ids_BT, window, ends_BT)

    choose = by_kind(cfg, make)

    def attention(kind: Array | None = None) -> tuple[tuple[Array, Array], Callable]:
        rope, visible = choose(kind)

        def attend(q: Array, k: Array, v: Array, scales: KvScales | None = None) -> tuple[Array, KvScales]:
            amax, s = amax_of(q, k, v, segment_ids_BT > 0), scales or UNIT
            if rounded.fp8:
                k, v = (nn.round_scaled(a, s[n], rounded.truncated) for n, a in (("k", k), ("v", v)))
            if by_kernels:
                q = nn.round_scaled(q, s["q"]) if rounded.attention_fp8 else q
                return packed.attention(q, k, v, visible, scale=cfg.attention_scale,
                                        fp8=rounded.attention_fp8, backend="pallas"), amax
            return nn.attention(q, k, v, visible, rounded.attention_fp8, s["q"], rounded.probabilities,
                                cfg.attention_scale), amax

        return rope, attend

    return attention


def init_cache(cfg: ModelConfig, batch: int, length: int, precision: Precision) -> KVCache:
    """An empty cache for `batch` rows of at most `length` positions, whose pages lie in order: E4M3 with
    scale 1 when `kv.fp8`, else compute dtype."""
    page = math.gcd(length, PAGE)
    table = jnp.arange(batch * length // page, dtype=jnp.int32).reshape(batch, -1)
    return empty_pages(cfg, table.size, page, precision)._replace(table=table)


def page_of(length: int) -> int:
    """The number of slots of a page for rows of at most `length` positions."""
    return PAGE if length >= 8 * PAGE else SMALL_PAGE


def empty_pages(cfg: ModelConfig, pages: int, page: int, precision: Precision) -> KVCache:
    """So many empty pages of `page` slots each, without a table."""
    dtype = jnp.float8_e4m3fn if precision.kv.fp8 else jnp.dtype(precision.compute_dtype)
    shape = (cfg.num_hidden_layers, pages, page, cfg.num_key_value_heads, cfg.head_dim)
    routes = None
    if cfg.experts:
        routes = (sum(cfg.sparse_layers), pages, page, cfg.experts.num_experts_per_tok)
        routes = jnp.zeros(routes, moe.route_dtype(cfg.experts))
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), routes)


def forward_cached(
    params: Params, cfg: ModelConfig, tokens_BT: Array, positions_BT: Array, cache: KVCache,
    precision: Precision
) -> tuple[Array, KVCache]:
    """Hidden states [B, T, D] of new tokens, and the cache with their keys and values. Decode, with T = 1,
    and prefill of a row each.

    A token writes the slot of `positions_BT` of its row, then sees the slots up to its own. So a right-padded
    prompt is harmless: the slots of its padding are overwritten by decoded tokens before anything may see
    them. Writes past the end are dropped. Decode goes by the kernel for paged caches where
    `decodes_by_kernel` says so; prefill, and all else, by XLA. The cache is carried through the scan and
    updated in place when the caller donates it.
    """
    places = places_of(cache, positions_BT)
    by_kernel = tokens_BT.shape[1] == 1 and decodes_by_kernel(cfg, precision)
    if precision.exact and not by_kernel:
        attention = one_policy.decoded(positions_BT, cache, places, cfg, precision)
        return _exactly_through_cache(params, cfg, tokens_BT, cache, precision, attention, places)
    length = cache.k.shape[2] * cast(Array, cache.table).shape[1]
    if by_kernel:
        attention = PagedStep(positions_BT, cache, cfg, precision, places)
        return _through_cache(params, cfg, tokens_BT, cache, precision, attention, places)
    choose = by_kind(cfg, lambda kind: (
        nn.rope_tables(positions_BT, kind.rope, cfg.head_dim, precision.rounding.rope_dtype),
        _slots_seen(positions_BT, length, kind.window_within(length))))

    def attention(kind: Array | None, cache: KVCache, layer: Array, scales: KvScales) -> tuple:
        rope, seen = choose(kind)

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
            into = written(cache, layer, places, k, v, scales)
            keys, values = (_read(x, into, layer, scales[n], q.dtype)
                            for n, x in (("k", into.k), ("v", into.v)))
            return nn.attention(q, keys, values, cast(Array, seen), precision.kv.attention_fp8, scales["q"],
                                precision.kv.probabilities, cfg.attention_scale), into

        return rope, attend

    return _through_cache(params, cfg, tokens_BT, cache, precision, attention, places)


def prefill(
    params: Params, cfg: ModelConfig, tokens_BT: Array, positions_BT: Array, segment_ids_BT: Array,
    pages_BT: Array, cache: KVCache, precision: Precision,
) -> tuple[Array, KVCache]:
    """`forward` of packed prompts, and the cache with their keys and values: those of a token lie in slot
    positions_BT % page of its page. Padding, whose page is none, is dropped."""
    places = pages_BT, positions_BT % cache.k.shape[2]
    if precision.exact:
        attention = one_policy.prefilled(positions_BT, segment_ids_BT, places, cfg, precision)
        return _exactly_through_cache(params, cfg, tokens_BT, cache, precision, attention, places)
    packed_by = packed_attention(positions_BT, segment_ids_BT, cfg, precision)

    def attention(kind: Array | None, cache: KVCache, layer: Array, scales: KvScales) -> tuple:
        rope, attend = packed_by(kind)

        def attend_and_write(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
            return attend(q, k, v, scales)[0], written(cache, layer, places, k, v, scales)

        return rope, attend_and_write

    return _through_cache(params, cfg, tokens_BT, cache, precision, attention, places, segment_ids_BT > 0)


def _through_cache(params: Params, cfg: ModelConfig, tokens_BT: Array, cache: KVCache, precision: Precision,
                   attention: Callable, places: tuple[Array, Array],
                   live_BT: Array | None = None) -> tuple[Array, KVCache]:
    """Hidden states, and the cache. attention(kind, cache, layer, scales) -> (rope, attend), of which
    attend(q, k, v) -> (o, cache)."""
    x, one_each = embed(params, tokens_BT, cfg, precision), live_BT is None and tokens_BT.shape[1] == 1
    for run, weights in runs_of(params, cfg, precision):
        why = few_rows.why_not(cfg, precision, run, len(tokens_BT)) if one_each else "several tokens a row"
        if precision.exact and why:
            raise ValueError(f"layers {run.start} to {run.stop - 1} have no exact kernels: {why}")
        if not why:
            x, cache = _by_few_rows(x, cache, run, weights, cfg, precision, attention)
            continue

        def body(carry: Any, layer: tuple, run: LayerRun = run) -> tuple[Any, None]:
            (x, cache), (index, w, kind), routings = carry, layer, []
            rope, attend = attention(kind, cache, index, w.get("kv_scales") or UNIT)
            compute = DecoderLayer(cfg, precision, run, rope, attend,
                                   mixture=mixture_of(cfg, routings, live_BT))
            x, cache = compute(x, w)
            if routings:
                row = index - run.start + first_row(run, precision.runs, "moe")
                cache = cache._replace(routes=store(cache.routes, row, places, routings[0].ids))
            return (x, cache), None

        steps = jnp.arange(run.start, run.stop), weights, kinds_of(cfg, run)
        (x, cache), _ = jax.lax.scan(body, (x, cache), steps)
    return (_exact_final_norm if precision.exact else final_norm)(x, params, cfg, precision), cache


def _exactly_through_cache(params: Params, cfg: ModelConfig, tokens_BT: Array, cache: KVCache,
                           precision: Precision,
                           attention: Callable, places: tuple[Array, Array]) -> tuple[Array, KVCache]:
    """`_through_cache` by layers of `one_policy`."""
    x = cast(Array, embed(params, tokens_BT, cfg, precision)).reshape(tokens_BT.size, -1)
    for run, weights in runs_of(params, cfg, precision):

        def body(carry: Any, layer: tuple, run: LayerRun = run) -> tuple[Any, None]:
            (x, cache), (index, w, kind) = carry, layer
            attend = attention(kind, cache, index, w.get("kv_scales") or UNIT)
            x, cache, ids = one_policy.layer(cfg, precision, run, x, w, attend)
            if ids is not None:
                row = index - run.start + first_row(run, precision.runs, "moe")
                ids = ids.reshape(*tokens_BT.shape, -1)
                cache = cache._replace(routes=store(cache.routes, row, places, ids))
            return (x, cache), None

        steps = jnp.arange(run.start, run.stop), weights, kinds_of(cfg, run)
        (x, cache), _ = jax.lax.scan(body, (x, cache), steps)
    return _exact_final_norm(x, params, cfg, precision).reshape(*tokens_BT.shape, -1), cache


def _exact_final_norm(x: Residual, params: Params, cfg: ModelConfig, precision: Precision) -> Array:
    fixed = constant({"norm": params["norm"]})
    norm = functools.partial(final_norm, params=fixed, cfg=cfg, precision=precision)
    return one_policy.final_norm(cast(Array, x), norm, fixed["norm"]["weight"], cfg.rms_norm_eps, precision)


def _by_few_rows(x: Any, cache: KVCache, run: LayerRun, weights: Params, cfg: ModelConfig,
                 precision: Precision,
                 attention: Callable) -> tuple[Array, KVCache]:
    """A run of layers of `few_rows`: x [B, 1, D] and the cache after them."""

    def body(carry: Any, layer: tuple) -> tuple[Any, None]:
        (x, y, cache), (index, w, kind) = carry, layer
        scales = w.get("kv_scales") or UNIT
        if isinstance(attention, PagedStep):
            attend = functools.partial(attention.heads, kind, cache, index, scales)
        else:
            attend = few_rows.apart(cfg, *attention(kind, cache, index, scales))
        return few_rows.layer(cfg, precision, attend, x, y, w), None

    steps = jnp.arange(run.start, run.stop), few_rows.with_scales(weights), kinds_of(cfg, run)
    (a, b, cache), _ = jax.lax.scan(body, (x[:, 0], jnp.zeros_like(x[:, 0]), cache), steps)
    return (a + b)[:, None], cache


def _slots_seen(positions_BT: Array, length: int, window: int | None) -> Array:
    """[B, T, S] bool: a token sees the slots up to its own, of which at most the last `window`."""
    slots, own = jnp.arange(length), positions_BT[:, :, None]
    return slots <= own if window is None else (slots <= own) & (slots > own - window)


def head_weight(params: Params, cfg: ModelConfig) -> Array:
    """The output projection [V, D]: `lm_head`, or the embedding when they are tied."""
    return params["embed_tokens" if cfg.tie_word_embeddings else "lm_head"]["weight"]


def split_layers(params: Params, precision: Precision) -> Params:
    """The same tree with one stack of layers for each run of equal precision, so that runs can differ in leaf
    types."""

    def stack_of(run: LayerRun) -> Params:
        rows = {name: rows_of(run, precision.runs, name) for name in params["layers"]}
        return {name: jax.tree.map(operator.itemgetter(at), params["layers"][name])
                for name, at in rows.items() if at}

    return {**params, "layers": tuple(map(stack_of, precision.runs))}


def embed(params: Params, tokens_BT: Array, cfg: ModelConfig, precision: Precision,
          layout: MeshLayout = ONE) -> Residual:
    """What enters the first layer, [B, T, D], rounded to `precision.compute_dtype`; an UnfusedResidual where
    norms see unrounded sums. Where a layer rounds the stream once, it is float32, and the first norm sees a
    scaled embedding unrounded, too."""
    x, rounding = layout.lookup(params["embed_tokens"]["weight"], tokens_BT), precision.rounding
    x = x.astype(precision.compute_dtype)
    if cfg.family.scaled_embedding:  # the factor is rounded, too, as in transformers and vLLM
        whole = x.astype(jnp.float32) * jnp.asarray(cfg.hidden_size**0.5, x.dtype).astype(jnp.float32)
        x = whole if rounding.residual_once else whole.astype(x.dtype)
    if rounding.residual_once:
        return x.astype(jnp.float32)
    return nn.UnfusedResidual(x, jnp.zeros_like(x)) if rounding.fused or rounding.unrounded_sums else x


def final_norm(x_BTD: Residual, params: Params, cfg: ModelConfig, precision: Precision) -> Array:
    """The norm after the last layer, [B, T, D] in `precision.compute_dtype`."""
    return nn.rms_norm(x_BTD, params["norm"]["weight"], cfg.rms_norm_eps, precision.compute_dtype,
                       precision.rounding.fused, cfg.family.unit_offset)


def runs_of(params: Params, cfg: ModelConfig, precision: Precision) -> list[tuple[LayerRun, Params]]:
    """Each run of equal precision with its stacked layers, and their scales of keys and values where the tree
    has any; a single stack that is one run is not sliced (a slice copies)."""
    runs, stacks = precision.runs, params["layers"]
    if runs[-1].stop != cfg.num_hidden_layers:
        raise ValueError(
            f"the precision covers {runs[-1].stop} layers, the model has {cfg.num_hidden_layers}")
    if any(set(cfg.sparse_layers[run.start : run.stop]) != {run.sparse} for run in runs):
        raise ValueError(
            "the precision's runs are not of layers with and without experts: see "
            "precision.recipe.plain_runs")
    if isinstance(stacks, dict):
        stacks = (stacks,) if len(runs) == 1 else split_layers(params, precision)["layers"]
    if scales := params.get("kv_scales"):
        spans = [slice(run.start, run.stop) for run in runs]
        stacks = [{**stack, "kv_scales": {n: s[at] for n, s in scales.items()}}
                  for stack, at in zip(stacks, spans)]
    return list(zip(runs, stacks, strict=True))


def _read(stored: Array, cache: KVCache, layer: Array, scale: Array, dtype: DTypeLike) -> Array:
    """All keys or values of each row, [B, S, K, d]."""
    x = stored.at[layer, cast(Array, cache.table)].get(mode="clip").astype(dtype)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    return x * jnp.asarray(scale, dtype) if stored.dtype == jnp.float8_e4m3fn else x
