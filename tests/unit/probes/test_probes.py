"""The precision probes against cases whose answer is known: counted codes, a layer spoilt on purpose, brute
force."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from bridges.api import Capabilities, EngineFormats
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.monitors.spikes import SpikeCounter
from jaxfp8rl.policy.warnings import engine_warning, kv_fp8_warning
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun, fp8_runs, without_fp8
from jaxfp8rl.precision.recipe import FP8_KV, FP8_WEIGHT, get_recipe, resolve
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.probes.finite import bad_tensors, check_finite, find_nonfinite
from jaxfp8rl.probes.probes import (
    _formats,
    _look,
    forward_with_hooks,
    layer_groups,
    mixed_forward,
    precision_report,
    rounding_stats,
    unquantized_policy,
    weight_stats,
)
from jaxfp8rl.probes.report import PrecisionReport
from jaxfp8rl.training import updates
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")
MODEL = ModelConfig("Qwen3ForCausalLM", 97, 128, 256, 3, 2, 2, 64, 64)
LINEARS = [name.split(".")[-1] for name in linear_shapes(MODEL)]
FULL = Precision(fp8_runs(linear_shapes(MODEL), 3), kv=KvFormat(fp8=True, attention_fp8=True),
                 compute_dtype="float32")
SPOILT, NEURONS = 1, (0, 128)  # one hidden neuron in each block of rows of that layer's gate_proj


@functools.cache
def params():
    """Matrices some times the usual: no layer is nearly the identity."""
    return jax.tree.map(lambda p: 3 * p if jnp.std(p) > 0 else p, init_params(MODEL, jax.random.key(0)))


def changed(tree, *path_and_change):
    """The tree with `change` applied to the leaf at `path`."""
    *path, change = path_and_change
    return change(tree) if not path else {**tree, path[0]: changed(tree[path[0]], *path[1:], change)}


@functools.cache
def spoilt_params():
    """In layer 1, gate_proj's rows of two neurons are 2^21 times too large. Their up_proj and down_proj are
    zero: nothing changes but for FP8, whose blocks then have no codes left for the others."""
    rows = jnp.asarray(NEURONS)
    tree = changed(params(), "layers", "mlp", "gate_proj", "weight",
                   lambda w: w.at[SPOILT, rows].multiply(2.0**21))
    tree = changed(tree, "layers", "mlp", "up_proj", "weight", lambda w: w.at[SPOILT, rows].set(0))
    return changed(tree, "layers", "mlp", "down_proj", "weight", lambda w: w.at[SPOILT, :, rows].set(0))


@functools.cache
def batch():
    rng = np.random.default_rng(0)
    samples = [
        Sample(rng.integers(1, 97, 5), rng.integers(1, 97, n), -np.ones(n, np.float32), 1.0)
        for n in (9, 8, 7, 7, 6, 3)
    ]
    return pack(samples, 32, 2, 2)


def micro():
    return jax.tree.map(lambda x: x[0], batch())


@functools.cache
def spoilt_report() -> PrecisionReport:
    return precision_report(spoilt_params(), batch(), MODEL, FULL)


# --- rounding errors


def known_block(clipped: int, zeros: int, tiny: int, scale: float) -> np.ndarray:
    """[128, 128] with that many codes of 448, zeros, and values too small for a code; 1 elsewhere. All times
    `scale`."""
    flat = np.ones(128 * 128, np.float32)
    flat[:clipped] = 448 * np.resize([1, -1], clipped)
    flat[clipped : clipped + zeros] = 0
    flat[clipped + zeros : clipped + zeros + tiny] = 2.0**-11
    return np.random.default_rng(0).permutation(flat).reshape(128, 128) * scale


def test_codes_are_counted_and_the_error_is_what_underflowed():
    w = np.stack([known_block(3, 10, 7, 2.0**-6), known_block(1, 0, 100, 2.0**3)]).reshape(256, 128)
    codes, scale = q.quantize_blocks(w)
    stats = rounding_stats(jnp.asarray(w), codes, scale, q.dequantize_blocks(codes, scale))
    n = w.size
    want = {"clipped": 4 / n, "zero": 117 / n, "underflow": 107 / n, "scale_min": 2.0**-6,
            "scale_max": 2.0**3}
    lost = np.sqrt(7 * 2.0**-34 + 100 * 2.0**-16)
    want["error"] = lost / np.linalg.norm(w.astype(np.float64))
    for name, value in want.items():
        assert float(stats[name]) == pytest.approx(value, rel=1e-5), name


def test_weights_are_judged_by_layer_and_linear():
    w = known_block(2, 5, 9, 1.0)
    tree = changed(params(), "layers", "self_attn", "v_proj", "weight", lambda old: old.at[2].set(w))
    stats = weight_stats(tree, MODEL)
    at = 2, LINEARS.index("v_proj")
    assert stats["underflow"].shape == (3, 7)
    assert float(stats["underflow"][at]) == pytest.approx(9 / w.size) and float(stats["scale_max"][at]) == 1.0
    assert np.delete(np.asarray(stats["underflow"]).ravel(), np.ravel_multi_index(at, (3, 7))).max() < 1e-4
    errors = np.delete(np.asarray(stats["error"]).ravel(), np.ravel_multi_index(at, (3, 7)))
    # but for the known block, all of whose values are codes
    assert 0.02 < errors.min() and errors.max() < 0.03


def test_padding_is_not_judged():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 256)).astype(np.float32)
    live = np.arange(6) < np.array([[6], [3]])
    padded = np.where(live[..., None], x, 1e9)

    @jax.jit
    def stats(x, live=None):
        codes, scale = q.quantize_rows(x)
        return rounding_stats(x, codes, scale, q.dequantize_rows(codes, scale), live)

    got, want = stats(jnp.asarray(padded), jnp.asarray(live)), stats(jnp.asarray(x[live]))
    for name in want:
        assert float(got[name]) == pytest.approx(float(want[name]), rel=1e-6), name


# --- the whole report


def test_a_layer_spoilt_on_purpose_is_named():
    found = spoilt_report().metrics()
    assert (found["precision/weight_underflow_layer"],
            LINEARS[found["precision/weight_underflow_linear"]]) == (1, "gate_proj")
    for name in ("one_in", "left_without", "leave_one_out"):
        assert found[f"precision/{name}_layer"] == SPOILT, name
    gaps = spoilt_report().gaps
    others = np.delete(gaps["one_in"], SPOILT)
    assert gaps["one_in"][SPOILT] > 3 * others.max()
    assert found["precision/weight_underflow_worst"] > 0.9
    assert gaps["weights"] > gaps["kv"] > 0
    assert gaps["left_without"][SPOILT] < gaps["all"] / 2 < np.delete(gaps["left_without"], SPOILT).min()


def test_the_same_model_unspoilt_is_even():
    report = precision_report(params(), batch(), MODEL, FULL)
    assert report.weights["error"].max() < 0.03 and report.activations["error"].max() < 0.03
    assert report.gaps["one_in"].max() < 5 * report.gaps["one_in"].min()
    assert report.gaps["all"] < spoilt_report().gaps["all"] / 3
    assert (report.kv["key_clipped"] == 0).all() and (0.02 < report.kv["key_error"]).all()


def test_tables_metrics_and_file():
    report = spoilt_report()
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(report.tables())
    text = console.export_text()
    assert text.count("gate_proj") == 2 * 3 and "leave one out" in text and "sharpness" in text
    metrics = report.metrics()
    assert len(metrics) < 40 and all(k.startswith("precision/") and isinstance(v, float | int)
                                     for k, v in metrics.items())


def test_a_saved_report_reads_back(tmp_path):
    spoilt_report().save(tmp_path / "r.json")
    back = PrecisionReport.load(tmp_path / "r.json")
    assert back.metrics() == pytest.approx(spoilt_report().metrics())
    assert back.spans == spoilt_report().spans and (back.fp8 == spoilt_report().fp8).all()


def test_what_stays_in_high_precision_is_not_in_the_metrics():
    fp8 = spoilt_report().fp8.copy()
    fp8[SPOILT] = False
    rest = PrecisionReport(**{**vars(spoilt_report()), "fp8": fp8, "kv_fp8": False, "activations_fp8": False})
    found = rest.metrics()
    assert found["precision/weight_error_layer"] != SPOILT and found[
        "precision/weight_underflow_worst"] < 0.01
    assert not any("key" in k or "activation" in k for k in found)


def test_a_gap_that_is_not_a_number_is_the_worst():
    gaps = spoilt_report().gaps | {"one_in": np.array([1.0, 2.0, np.nan])}
    assert PrecisionReport(**{**vars(spoilt_report()), "gaps": gaps}).metrics()["precision/one_in_layer"] == 2


@pytest.mark.parametrize("layers, groups", [(3, 16), (16, 16), (36, 16), (5, 2), (1, 4)])
def test_groups_cover_all_layers_in_order(layers, groups):
    spans = layer_groups(layers, groups)
    assert len(spans) == min(layers, groups) and spans[0][0] == 0 and spans[-1][1] == layers
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    sizes = [b - a for a, b in spans]
    assert max(sizes) - min(sizes) <= 1


def test_the_mixed_and_the_watched_forward_are_the_models_forward():
    """Also with runs that differ, the first layer in high precision, and with scales of the cache."""
    runs = (LayerRun(0, 1, frozenset()), LayerRun(1, 3, frozenset(LINEARS)))
    full = Precision(runs, kv=KvFormat(fp8=True), compute_dtype="float32")
    formats, m = _formats(full), micro()
    # small values vanish
    scales = {name: jnp.full(3, scale) for name, scale in (("q", 1.0), ("k", 2.0**7), ("v", 2.0**8))}
    weights = unquantized_policy({**params(), "kv_scales": scales}, full)
    live = m.segment_ids > 0

    @rounding_exact_jit
    def compare(weights):
        want = [forward(weights, MODEL, m.tokens, m.positions, m.segment_ids, f) for f in formats]
        mixed = jax.lax.map(lambda i: mixed_forward(weights, m, MODEL, formats, jnp.full(3, i)),
                            jnp.arange(4))
        watched, seen = forward_with_hooks(weights, m, MODEL, full,
                                           lambda name, x, live: x.astype(jnp.float32))
        return want, mixed, watched, seen

    want, mixed, watched, seen = compare(weights)
    for a, b in zip([*mixed, watched], [*want, want[1]]):
        gap = np.abs(np.asarray(a - b))[live]
        assert np.median(gap) < 1e-5  # an ulp may tip a code over; most tokens never see one
    assert np.abs(np.asarray(want[0] - want[1]))[live].mean() > 1e-3
    assert set(seen) == {*LINEARS, "key", "value", "output"}
    assert seen["q_proj"].shape == (3, 2, 32, 128) and seen["down_proj"].shape == (3, 2, 32, 256)
    np.testing.assert_array_equal(seen["gate_proj"], seen["up_proj"])
    assert jnp.abs(seen["key"]).max() < 1 < 2**7 * jnp.abs(seen["key"]).max()


def test_keys_are_judged_as_the_engine_rounds_them():
    keys, live = jax.random.normal(jax.random.key(0), (2, 6, 2, 64)), jnp.ones((2, 6), bool)
    formats = (KvFormat(fp8=True, truncated=t) for t in (False, True))
    nearest, cut = (_look(dataclasses.replace(FULL, kv=kv), "key", keys, live)["error"] for kv in formats)
    assert 0.02 < nearest < 0.03 < 1.8 * nearest < cut


@pytest.mark.parametrize("name", ["bf16", "fp8_rollout", "fp8_unified"])
def test_what_is_measured_is_the_engines_whatever_the_learner_computes_in(name, monkeypatch, tmp_path):
    recipe, asked = get_recipe(name), []
    runs = FULL.runs if recipe.engine_fp8 else without_fp8(FULL.runs)
    weights = FP8_WEIGHT if recipe.engine_fp8 else "bfloat16"
    formats = EngineFormats(weights, "bfloat16", FP8_KV, "bfloat16", FP8_KV, fused_quantizer=True,
                            kv_truncated=True)
    engine = SimpleNamespace(capabilities=lambda: SimpleNamespace(formats=formats))
    precision = resolve(recipe, runs, formats, "bfloat16", "bfloat16")
    cfg = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0))
    parts = SimpleNamespace(engine=engine, cfg=cfg, runs=runs, precision=precision, model=MODEL,
                            spikes=SpikeCounter())
    monkeypatch.setattr(updates, "precision_report", lambda *args: asked.append(args) or spoilt_report())
    state, policy = SimpleNamespace(params={"layers": "masters"}), {"kv_scales": "scales", "layers": "codes"}
    assert "precision/key_clipped" in updates.probe(parts, SimpleNamespace(path=tmp_path), state, policy,
                                                    batch())
    ((params, _, _, measured, _),) = asked
    assert params == {"layers": "masters", "kv_scales": "scales"}
    rounding = dataclasses.replace(precision.rounding, fused_quantizer=True)
    kv = KvFormat(fp8=True, truncated=True, attention_fp8=True)
    assert measured == dataclasses.replace(precision, runs=runs, kv=kv, rounding=rounding)


# --- bad input


def test_tensors_that_are_not_finite_are_named_with_their_layer_and_count():
    check_finite(params(), MODEL)
    tree = changed(params(), "layers", "mlp", "down_proj", "weight", lambda w: w.at[2, 0, :3].set(jnp.nan))
    tree = changed(tree, "layers", "self_attn", "q_norm", "weight", lambda w: w.at[1, 5].set(jnp.inf))
    tree = changed(tree, "embed_tokens", "weight", lambda w: w.at[0].set(-jnp.inf))
    tree = changed(tree, "norm", "weight", lambda w: w.at[0].set(jnp.nan))
    names = ["model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight",
             "model.layers.2.mlp.down_proj.weight",
             "model.norm.weight"]
    assert [(b.hf_name, b.bad) for b in bad_tensors(tree, MODEL)] == list(zip(names, (128, 1, 3, 1)))
    with pytest.raises(ModelError) as e:
        check_finite(tree, MODEL, "the gradients")
    text = str(e.value)
    assert text.startswith("the gradients are not finite")
    assert "model.layers.2.mlp.down_proj.weight (3 of 32768 elements)" in text
    assert "and 1 more tensor" in text and "next step" in text


def test_the_place_where_an_update_broke_is_named():
    plain = Precision.uniform(3)
    assert "the forward pass are finite" in find_nonfinite(params(), batch(), MODEL, plain)
    m, r, t = map(int, np.argwhere(batch().response_mask)[4])
    logp = batch().rollout_logp.copy()
    logp[m, r, t] = np.nan
    found = find_nonfinite(params(), batch()._replace(rollout_logp=logp), MODEL, plain)
    assert found == ("rollout_logp of the batch is not finite at 1 tokens, "
                     f"first at micro-batch {m}, row {r}, token {t}")
    assert "old_logp of the batch" in find_nonfinite(params(), batch(), MODEL, plain, old_logp=logp)
    broken = changed(params(), "layers", "self_attn", "k_proj", "weight",
                     lambda w: w.at[1, 0, 0].set(jnp.nan))
    assert "model.layers.1.self_attn.k_proj.weight (1 of 16384" in find_nonfinite(
        broken, batch(), MODEL, plain)


def test_the_layer_whose_activations_overflow_is_named():
    huge = params()
    for name in ("gate_proj", "up_proj"):
        huge = changed(huge, "layers", "mlp", name, "weight", lambda w: w.at[1].multiply(1e22))
    live = int((batch().segment_ids[0] > 0).sum())
    found = find_nonfinite(huge, batch(), MODEL, Precision.uniform(3))
    assert found == f"micro-batch 0, layer 1: the input of mlp.down_proj is not finite at {live} tokens"


def test_a_served_vllm_that_nobody_has_tested_is_said():
    formats = EngineFormats("bfloat16", "bfloat16", "bfloat16", "bfloat16")
    engine = lambda *name: Capabilities(*name, formats, 64, 97, True)
    demo, served = load_config("demo"), load_config("demo", ["--rollout.engine", "served"])
    assert not any(engine_warning(served, engine(*name))
                   for name in (("vllm", "0.25.1"), ("vllm", "0.32.0+cpu"), ("jax", "0.11.2"), ("fake", "?")))
    assert "vllm 0.26.0 has not been tested" in engine_warning(served, engine("vllm", "0.26.0"))
    assert engine_warning(demo, engine("vllm", "0.26.0")) is None  # version_warnings says it before it starts


def test_fp8_keys_without_query_key_norm_are_warned_of():
    llama = ModelConfig("LlamaForCausalLM", 97, 128, 256, 3, 2, 2, 64, 64)
    fp8 = EngineFormats("bfloat16", "bfloat16", FP8_KV, "bfloat16")
    high = EngineFormats("bfloat16", "bfloat16", "bfloat16", "bfloat16")
    assert kv_fp8_warning(MODEL, fp8) is None and kv_fp8_warning(llama, high) is None
    assert kv_fp8_warning(llama, fp8, calibrated=True) is None
    warning = kv_fp8_warning(llama, fp8)
    assert all(said in warning for said in ("LlamaForCausalLM", "precision/key_clipped", "rollout.kv_cache"))
