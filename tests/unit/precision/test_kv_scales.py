"""Scales of FP8 attention: powers of two from what was seen, the same in the learner, on the wire and in the
engine."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.proof import manifest
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models import layers
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward_and_amax
from jaxfp8rl.precision.kv_scales import NAMES, amax_of, remember, scales_from
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.training import calibrate, context, gate, publishing, updates
from jaxfp8rl.training.calibrate import KvCalibration
from jaxfp8rl.training.context import build_run
from jaxfp8rl.training.update_batches import pack_samples

pytestmark = pytest.mark.usefixtures("quick_compile")
MODEL = ModelConfig.from_hf(
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64,
     "intermediate_size": 64,
     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
     "max_position_embeddings": 64,
     "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": True}
)
FP8_KV = Precision.uniform(2, kv=KvFormat(fp8=True, attention_fp8=True))


@given(st.floats(2.0**-99, 2.0**100, width=32))
def test_a_scale_is_a_power_of_two_that_leaves_the_largest_at_128_to_256(amax):
    scale = float(scales_from({"k": jnp.float32(amax)})["k"])
    assert np.frexp(scale)[0] == 0.5
    assert 128 <= np.float32(amax) / scale < 256


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan, 1e-38])
def test_a_scale_is_1_where_the_largest_says_nothing(amax):
    assert float(scales_from({"v": jnp.float32(amax)})["v"]) == 1.0


def test_padding_does_not_count():
    x = jnp.arange(24.0).reshape(1, 3, 2, 4)
    live = jnp.array([[True, True, False]])
    assert [float(a) for a in amax_of(x, -x, x.at[:, 1].set(0), live).values()] == [15.0, 15.0, 7.0]
    assert [float(a) for a in amax_of(x, x, x, live & False).values()] == [0.0] * 3


def test_what_was_seen_is_forgotten_slowly():
    a, b = {"k": jnp.array([8.0, 1.0])}, {"k": jnp.array([1.0, 4.0])}
    np.testing.assert_allclose(remember(remember(None, a, 0.5), b, 0.5)["k"], [4.0, 4.0])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_is_not_remembered(bad):
    """Once in the maximum it would stay there, and the scale 1, for good; and it would hide what other
    batches have seen."""
    found = None
    for seen in (bad, 8.0, bad):
        found = remember(found, {"k": jnp.array([seen])}, 0.5)
    np.testing.assert_array_equal(found["k"], [4.0])


def test_a_micro_batch_that_is_not_finite_hides_no_other(monkeypatch):
    seen = jnp.array([[jnp.nan, 3.0], [2.0, jnp.inf]])  # [micro-batches, layers]
    monkeypatch.setattr(calibrate, "map_live", lambda one, batch: (None, {"k": seen}))
    assert calibrate._observe(None, None, 1.0, None, None)[1]["k"].tolist() == [2.0, 3.0]


def test_it_is_forgotten_by_the_step_however_many_batches_a_step_has():
    kv = KvCalibration(MODEL, FP8_KV, 1.0, decay=0.5)
    kv.observe = lambda policy, amax: (None, {"k": jnp.array([amax])})
    for step, batches in enumerate(((8.0,), (1.0, 3.0, 2.0), (1.0, 5.0))):
        for amax in batches:
            kv.score({}, amax)
        kv.apply({})
        assert float(kv.amax["k"][0]) == (8.0, 4.0, 5.0)[step]
    kv.apply({})  # to publish once more, nothing having been scored
    assert float(kv.amax["k"][0]) == 5.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rounding_over_a_scale_is_rounding_in_its_units(dtype):
    """So nothing but E4M3's own rounding is in it, and large keys are no longer cut off."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=4000) * 1500, dtype)
    scale = scales_from({"k": jnp.max(jnp.abs(x)).astype(jnp.float32)})["k"]
    got = layers.round_scaled(x, scale)
    np.testing.assert_array_equal(got, layers.to_e4m3(x / scale.astype(dtype)).astype(dtype)
                                  * scale.astype(dtype))
    assert (jnp.abs(got - x) <= jnp.abs(x) / 16 + scale * 2.0**-10).all()
    assert jnp.abs(layers.round_scaled(x, 1.0) - x).max() > 1000


def outputs(params: dict, scales: dict | None, precision: Precision = FP8_KV):
    tokens = jnp.arange(12)[None] * 5 % 64
    tree = params | ({"kv_scales": scales} if scales else {})
    return forward_and_amax(tree, MODEL, tokens, jnp.arange(12)[None], jnp.ones_like(tokens), precision)


def test_the_forward_reports_what_each_layer_holds_and_rounds_over_the_scales():
    """Keys times 2^12 and queries times 2^-12, over scales times the same, round alike, and their product is
    the same."""
    params = init_params(MODEL, jax.random.key(0))
    scales = {name: jnp.ones(2) for name in NAMES}
    hidden, amax = outputs(params, None)
    assert {k: v.shape for k, v in amax.items()} == {"q": (2,), "k": (2,), "v": (2,)}
    np.testing.assert_array_equal(outputs(params, scales)[0], hidden)
    louder = jax.tree.map(lambda w: w, params)
    louder["layers"]["self_attn"]["k_norm"]["weight"] *= 2.0**12  # keys of 4,000 and more: cut off at scale 1
    louder["layers"]["self_attn"]["q_norm"]["weight"] *= 2.0**-12  # and queries that vanish
    lost, seen = outputs(louder, None)
    assert seen["k"][0] == amax["k"][0] * 2.0**12  # the next layer's input is spoilt already
    scaled, _ = outputs(louder, {"q": scales["q"] * 2.0**-12, "k": scales["k"] * 2.0**12, "v": scales["v"]})
    np.testing.assert_array_equal(scaled, hidden)
    assert jnp.abs(lost - hidden).max() > 0.01
    exact = outputs(params, None, Precision.uniform(2))[0]
    calibrated = outputs(louder, scales_from(seen))[0]
    assert jnp.abs(calibrated - exact).mean() < 2 * jnp.abs(hidden - exact).mean()


def test_a_reference_is_scored_in_the_policys_attention():
    """By scales of its own, 1, keys above 448 would be cut off, and the KL would pull towards that."""
    seen = []
    ctx = types.SimpleNamespace(
        kv_scales=None, replay=None, score=lambda policy, batch: seen.append(policy),
        cfg=types.SimpleNamespace(loss=types.SimpleNamespace(old_policy="recomputed")),
    )
    context.RunContext._refer_to(ctx, {"layers": "reference's"})
    scales = {name: jnp.full(2, 8.0) for name in "qkv"}
    updates.score(ctx, {"layers": "policy's", "kv_scales": scales},
                  types.SimpleNamespace(_replace=lambda routes: None))
    assert seen[1] == {"layers": "reference's", "kv_scales": scales}


OPTIONS = ["--rollout.kv_scales", "calibrated", "--run.dir", "unused", "--gate.completions", "16"]


def test_learner_and_embedded_engine_share_the_scales():
    """Keys so large that scale 1 would cut them off: the wire carries the scales, and learner and engine
    agree."""
    ctx = build_run(load_config("demo", OPTIONS))
    params = ctx.initial_params()
    params["layers"]["self_attn"]["k_norm"]["weight"] *= 500.0
    policy = publishing.with_scales(ctx, ctx.policy(params))
    assert (np.asarray(policy["kv_scales"]["k"]) >= 4).all()
    receipt = publishing.publish(ctx, policy, 0)
    # of all tensors, though the codes are the learner's own and are not copied
    assert receipt.digest == manifest.digest(ctx.engine.expected_manifest()) and receipt.tensors
    assert sum(m.role == "kv_scale"
               for m in ctx.engine.expected_manifest()) == 3 * ctx.model.num_hidden_layers
    gaps = gate.gate(ctx, policy, 0)
    assert gaps["gate/mean_gap"] < 1e-3  # flipped roundings alone
    dropped = {k: v for k, v in policy.items() if k != "kv_scales"}
    with pytest.raises(Exception, match="missing from the source"):
        publishing.publish(ctx, dropped, 1)
    ctx.close()


def test_the_scoring_pass_gives_the_same_log_probabilities_and_remembers():
    ctx = build_run(load_config("demo", OPTIONS))
    policy = publishing.with_scales(ctx, ctx.policy(ctx.initial_params()))
    before = jax.tree.map(np.asarray, ctx.kv_scales.amax)
    samples = [Sample(p.token_ids, (1, 2, 3), np.zeros(3, np.float32), 0.0) for p in ctx.train[:8]]
    batch = pack_samples(ctx, samples)
    np.testing.assert_allclose(ctx.kv_scales.score(policy, batch), ctx.score(policy, batch), atol=1e-5)
    ctx.kv_scales.apply(policy)
    assert all((np.asarray(ctx.kv_scales.amax[n]) >= 0.9 * before[n] * (1 - 1e-6)).all() for n in before)
    ctx.close()


@pytest.mark.parametrize(
    "options, says",
    [
        (["--rollout.kv_cache", "auto"], 'rollout.kv_cache = "auto" has no scales'),
        (["--loss.old_policy", "rollout", "--loss.objective", "reinforce"], "no scoring pass sees keys"),
    ],
)
def test_calibration_that_cannot_be_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        check(load_config("demo", [*OPTIONS, *options]))


def test_scales_are_no_part_of_the_gradient():
    ctx = build_run(load_config("demo", OPTIONS))
    assert ctx.precision.kv.fp8
    policy = publishing.with_scales(ctx, ctx.policy(ctx.initial_params()))
    from jaxfp8rl.policy.policy import grad_slots, gradients_like, outer

    assert "kv_scales" in policy
    assert all("kv_scales" not in tree for tree in (grad_slots(policy, "float32"), gradients_like(policy),
                                                    outer(policy)))
    ctx.close()
