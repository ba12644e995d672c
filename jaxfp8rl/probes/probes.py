"""Measure FP8's errors on one micro-batch of real tokens: rounding errors by layer and linear, the layers
that cause the mismatch, and the sharpness of the logits. The training step does not depend on these
diagnostics.

Rounding errors of each product, for its weight (128x128 blocks) and its input activations (1x128 blocks):

    error       ||x - back(x)|| / ||x||; three mantissa bits give about 0.026, or less if a few elements
                dominate
    clipped     |code| = 448; at least 1/16384 or 1/128, since each block's largest element is clipped
    zero        code = 0
    underflow   x != 0 but code = 0: elements 2^18.8 or more below their block's largest, whose scale fits
                them poorly
    scale       smallest and largest

Mismatch, as the mean |d logp| over response tokens, in nats. Each layer's format is chosen at run time
(`lax.switch` in the scan over layers), so that one compiled program measures all of these:

    one-in          only these layers FP8, against no FP8: the mismatch that they cause alone
    left without    all but these layers FP8, against no FP8: the mismatch that would be left if they stayed
                    in high precision
    leave-one-out   all but these layers FP8, against all FP8: the distance between these two policies;
                    always large for early layers, since every later rounding changes with them
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.losses.mismatch import mean_over
from jaxfp8rl.models import layers as nn
from jaxfp8rl.models import moe
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.transformer import embed, final_norm, head_weight, kinds_of, packed_attention, runs_of
from jaxfp8rl.policy.policy import as_params, policy_of, scales_in, without_scales
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.kv_scales import UNIT
from jaxfp8rl.precision.layer_runs import LayerRun, without_fp8
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import QuantizedWeight
from jaxfp8rl.probes.report import PrecisionReport
from jaxfp8rl.probes.sharpness import logit_sharpness
from jaxfp8rl.types import Params, TrainBatch
from pallas_kernels.quantize import reference as q

Stats = dict[str, Array]  # statistic -> [L] or [L, linears]


def precision_report(
    params: Params, batch: TrainBatch, model: ModelConfig, precision: Precision, temperature: float = 1.0,
    max_groups: int = 16
) -> PrecisionReport:
    """Run every probe on the policy `params` (float32 masters with one stack of layers, and "kv_scales" if it
    has them), on the first micro-batch of `batch` [M, R, T].

    `precision` mirrors the engine: `resolve` with "fp8_unified", even if the learner is BF16 and the report
    is about the engine's rounding. If there are more than `max_groups` layers, consecutive ones are measured
    together. It takes at most 2 * max_groups + 5 forward passes in two programs, and a third program for the
    weights; each is compiled once per model and batch shape.
    """
    weights = unquantized_policy(params, precision)
    micro = jax.tree.map(lambda x: x[0], batch)  # packing fills the first row first: it is never empty
    found, sharpness = _roundings(weights, micro, model, precision, temperature)
    spans = layer_groups(model.num_hidden_layers, max_groups)
    gaps = mismatch_gaps(weights, micro, model, precision, spans,
                         temperature) if precision.any_fp8 or precision.kv.fp8 else {}
    return PrecisionReport(
        linears=tuple(name.split(".")[-1] for name in linear_shapes(model)),
        fp8=fp8_table(model, precision),
        weights=_numpy(weight_stats(weights, model)),
        activations=_numpy(_by_linear(found, model)),
        kv=_numpy({f"{name}_{k}": v for name in ("key", "value") for k, v in found[name].items()}),
        spans=spans,
        gaps=_numpy(gaps),
        sharpness=float(sharpness),
        activations_fp8=precision.activations_fp8,
        kv_fp8=precision.kv.fp8,
    )


def fp8_table(model: ModelConfig, precision: Precision) -> np.ndarray:
    """[L, linears] bool: whether a product is FP8."""
    names = [name.split(".")[-1] for name in linear_shapes(model)]
    return np.array([[n in run.fp8 for n in names] for run in precision.runs
                     for _ in range(run.start, run.stop)])


def layer_groups(num_layers: int, max_groups: int) -> tuple[tuple[int, int], ...]:
    """At most `max_groups` spans [start, stop) of consecutive layers, as equal in size as possible."""
    parts = np.array_split(np.arange(num_layers), min(num_layers, max_groups))
    return tuple((int(p[0]), int(p[-1]) + 1) for p in parts)


# Rounding errors
# -------------------------------------------------------------------------------------------------------


def rounding_stats(x: Array, codes: Array, scale: Array, back: Array, live: Array | None = None) -> Stats:
    """The statistics above, as scalars, of x [..., K], its codes, its scales, and its dequantised value
    `back`.

    live [...]: rows where it is False are left out, together with their scales.
    """
    x, code = x.astype(jnp.float32), jnp.abs(codes.astype(jnp.float32))
    rows, blocks = (jnp.ones(a.shape, bool) if live is None else jnp.broadcast_to(live[..., None], a.shape)
                    for a in (x, scale))

    def fraction(where: Array) -> Array:
        return mean_over(rows, where)

    return {
        "error": _relative_error(back, x, rows),
        "clipped": fraction(code == q.E4M3_MAX),
        "zero": fraction(code == 0),
        "underflow": fraction((code == 0) & (x != 0)),
        "scale_min": jnp.min(scale, where=blocks, initial=jnp.inf),
        "scale_max": jnp.max(scale, where=blocks, initial=0.0),
    }


@functools.partial(rounding_exact_jit, static_argnums=1)
def weight_stats(weights: Params, model: ModelConfig) -> Stats:
    """The statistics of every linear's weight, each [L, linears] float32, computed one layer at a time."""

    def one(w: Array) -> Stats:
        quantised = QuantizedWeight.of(w)
        return rounding_stats(w, *quantised, q.dequantize_blocks(*quantised))

    by_name = {}
    for module in linear_shapes(model):
        block, name = module.split(".")
        by_name[name] = jax.lax.map(one, weights["layers"][block][name]["weight"])
    return _by_linear(by_name, model)


@functools.partial(rounding_exact_jit, static_argnums=(2, 3, 4))
def _roundings(weights: Params, micro: TrainBatch, model: ModelConfig, precision: Precision,
               temperature: float):
    """({linear name, "key" or "value": statistics [L]}, logit sharpness) of a forward pass in `precision`."""
    hidden, found = forward_with_hooks(weights, micro, model, precision, functools.partial(_look, precision))
    head = head_weight(weights, model)
    return found, logit_sharpness(hidden, head, micro.tokens, micro.response_mask, temperature,
                                  softcap=model.final_logit_softcapping)


def _look(precision: Precision, name: str, x: Array, live: Array) -> Stats | None:
    """The statistics of an array in a forward pass: the `look` of `forward_with_hooks`."""
    if name == "output":
        return None
    if name in ("key", "value"):
        rows = live[..., None] & jnp.ones(x.shape[:-1], bool)
        amax = jnp.max(jnp.abs(x), where=rows[..., None], initial=0.0)
        clipped = mean_over(rows[..., None] & jnp.ones(x.shape, bool), jnp.abs(x) > q.E4M3_MAX)
        rounded = nn.round_e4m3(x, precision.kv.truncated)
        return {"error": _relative_error(rounded, x, rows[..., None]), "clipped": clipped, "amax": amax}
    codes, scale = q.quantize_rows(x)
    return rounding_stats(x, codes, scale, q.dequantize_rows(codes, scale), live)


def _relative_error(got: Array, want: Array, where: Array) -> Array:
    """||got - want|| / ||want|| over the elements `where`, with 1 in place of a zero norm."""
    got, want = (jnp.where(where, a.astype(jnp.float32), 0.0) for a in (got, want))
    norm = jnp.linalg.norm(want.ravel())
    return jnp.linalg.norm((got - want).ravel()) / jnp.where(norm == 0, 1.0, norm)


def forward_with_hooks(
    weights: Params, micro: TrainBatch, model: ModelConfig, precision: Precision,
    look: Callable[[str, Array, Array], Any]
) -> tuple[Array, dict[str, Any]]:
    """The model's forward pass on one micro-batch of [R, T] fields, with a hook -> (hidden [R, T, D], the
    hook's results).

    look(name, x, live [R, T]) is called in every layer with three kinds of arrays: the input of each linear
    ("q_proj", ..., [R, T, K]), "key" and "value" as they enter the cache, divided by their scales
    [R, T, K, d], and the layer's "output" [R, T, D]. Its results are stacked over layers, [L, ...]. For a
    mixture of experts, "gate_proj" and "up_proj" are its input, and "down_proj" is its output.
    """
    live = micro.segment_ids > 0
    attention = packed_attention(micro.positions, micro.segment_ids, model, precision, micro.ends)
    x, stacks = embed(weights, micro.tokens, model, precision), []
    for run, stack in runs_of(weights, model, precision):

        def body(x: Any, step: tuple, run: LayerRun = run) -> tuple[Any, dict]:
            (w, kind), seen = step, {}
            rope, attend_packed = attention(kind)

            def product(name: str, x: Array, *rest: Any) -> Array:
                seen[name] = look(name, x, live)
                return linear(x, *rest)

            def attend(queries: Array, keys: Array, values: Array) -> tuple[Array, Any]:
                scales = w.get("kv_scales") or UNIT
                for name, x, scale in (("key", keys, scales["k"]), ("value", values, scales["v"])):
                    seen[name] = look(name, x / jnp.asarray(scale, x.dtype), live)
                return attend_packed(queries, keys, values, scales)

            def mixture(x: Array, weights: Params, precision: Precision, fp8: bool) -> Array:
                y, _ = moe.moe_block(x, weights, model.mixture, precision, fp8, live)
                ends = {"gate_proj": x, "up_proj": x, "down_proj": y}
                seen.update((name, look(name, end, live)) for name, end in ends.items())
                return y

            x, _ = DecoderLayer(model, precision, run, rope, attend, product, mixture)(x, w)
            return x, seen | {"output": look("output", nn.materialize(x), live)}

        x, seen = jax.lax.scan(body, x, (stack, kinds_of(model, run)))
        stacks.append(seen)
    seen = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stacks)
    return final_norm(x, weights, model, precision), seen


# The layers that cause the mismatch
# --------------------------------------------------------------------------------------


def mismatch_gaps(
    weights: Params, micro: TrainBatch, model: ModelConfig, precision: Precision, spans: tuple,
    temperature: float = 1.0
) -> dict[str, Array]:
    """The mean |d logp| in nats, for each of several mixtures of formats.

    "one_in", "left_without" and "leave_one_out" are [len(spans)], see above. "all", "weights" and "kv" are
    scalars against no FP8: with all FP8, with only FP8 weights, and with only FP8 keys, values and attention
    (0 if the precision has none).
    """
    plain, full, only_weights, only_kv = range(4)
    # first the rows with one format for all layers, then those with two formats
    rows = [[full], [plain], [only_weights], [only_kv]]
    rows = [row * model.num_hidden_layers for row in rows]
    inside = [[start <= i < stop for i in range(model.num_hidden_layers)] for start, stop in spans]
    rows += [[plain if x else full for x in span]
             for span in inside] + [[full if x else plain for x in span] for span in inside]
    return _gaps(weights, micro, jnp.asarray(rows), model, _formats(precision), temperature)


def _formats(full: Precision) -> tuple[Precision, ...]:
    """The formats of a layer to choose from: no FP8, all FP8 of `full`, FP8 weights only, FP8 cache only."""
    high = tuple(dataclasses.replace(run, fp8=frozenset()) for run in full.runs)
    no_kv = {"kv": dataclasses.replace(full.kv, fp8=False, attention_fp8=False)}
    return (
        dataclasses.replace(full, runs=high, **no_kv),
        full,
        dataclasses.replace(full, activations_fp8=False, **no_kv),
        dataclasses.replace(full, runs=high),
    )


@functools.partial(rounding_exact_jit, static_argnums=(3, 4, 5))
def _gaps(weights: Params, micro: TrainBatch, choices: Array, model: ModelConfig, formats: tuple,
          temperature: float):
    """The gaps of `mismatch_gaps`; choices [S, L] int32 indexes `formats`, with rows in the order made
    there."""

    def logprobs(choice: Array) -> Array:
        hidden = mixed_forward(weights, micro, model, formats, choice)
        head = head_weight(weights, model)
        return token_logprobs(hidden, head, micro.tokens, temperature,
                              logits_dtype=formats[0].rounding.logits_dtype,
                              softcap=model.final_logit_softcapping)[0]

    logp = jax.lax.map(logprobs, choices)
    full, plain, only_weights, only_kv = logp[:4]
    without, within = jnp.split(logp[4:], 2)

    def gap(a: Array, b: Array) -> Array:
        return mean_over(micro.response_mask, jnp.abs(a - b))

    return {
        "leave_one_out": jax.vmap(gap, (0, None))(without, full),
        "left_without": jax.vmap(gap, (0, None))(without, plain),
        "one_in": jax.vmap(gap, (0, None))(within, plain),
        "all": gap(full, plain),
        "weights": gap(only_weights, plain),
        "kv": gap(only_kv, plain),
    }


def mixed_forward(
    weights: Params, micro: TrainBatch, model: ModelConfig, formats: tuple[Precision, ...], choice: Array
) -> Array:
    """Hidden states [R, T, D] with layer l in formats[choice[l]]; choice [L] int32. The formats' runs cover
    the same layers."""

    def layer_in(precision: Precision, run: LayerRun) -> Callable:
        attention = packed_attention(micro.positions, micro.segment_ids, model, precision, micro.ends)

        def layer(x: Any, w: Params, kind: Array | None) -> Any:
            rope, attend = attention(kind)
            scaled = functools.partial(attend, scales=w.get("kv_scales"))
            return DecoderLayer(model, precision, run, rope, scaled)(x, w)[0]

        return layer

    x = embed(weights, micro.tokens, model, formats[0])
    for i, (run, stack) in enumerate(runs_of(weights, model, formats[0])):
        branches = [layer_in(f, f.runs[i]) for f in formats]
        body = lambda x, step, branches=branches: (jax.lax.switch(step[0], branches, x, *step[1:]), None)
        x, _ = jax.lax.scan(body, x, (choice[run.start : run.stop], stack, kinds_of(model, run)))
    return final_norm(x, weights, model, formats[0])


# Helpers
# ------------------------------------------------------------------------------------------------------------


def unquantized_policy(params: Params, precision: Precision) -> Params:
    """The policy before quantisation, in one stack of layers: masters rounded to `weight_dtype`, in
    `compute_dtype`, with the scales of FP8 attention unchanged."""
    plain = dataclasses.replace(precision, runs=without_fp8(precision.runs))
    return as_params(policy_of(without_scales(params), plain)) | scales_in(params)


def _by_linear(by_name: dict[str, Stats], model: ModelConfig) -> Stats:
    """{linear: {statistic: [L]}} -> {statistic: [L, linears]} in the order of `linear_shapes`."""
    columns = [by_name[module.split(".")[-1]] for module in linear_shapes(model)]
    return {k: jnp.stack([c[k] for c in columns], -1) for k in columns[0]}


def _numpy(tree: Stats) -> dict[str, np.ndarray]:
    return jax.tree.map(np.asarray, jax.device_get(tree))
