"""Noise on the gains of the policy that samples: what is drawn, what of it arrives, and that the mismatch
sees it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.config.noise import Noise
from jaxfp8rl.config.resume_rules import settled
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.mismatch import mismatch_metrics
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.noise import GainNoise, check_family
from jaxfp8rl.training import evaluation, publishing
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.update_batches import pack_samples

pytestmark = pytest.mark.usefixtures("quick_compile")
EXACT = ("--precision.recipe", "bf16", "--rollout.kv_cache", "auto", "--precision.compute_dtype", "float32",
         "--precision.weight_dtype", "float32")
STEPS = ("--run.steps", "100", "--sft.steps", "0")


def config(*words: str, start: float = 0.1, end: float = 0.1):
    return load_config("demo", ["--run.dir", "unused", *STEPS, "--noise.start", str(start), "--noise.end",
                                str(end),
                                *words])


def made(*words: str, cut: bool = False, **sigmas):
    """A run's noise and a policy of gains of 1, in one stack of layers, or `cut` into two."""
    cfg = config(*words, **sigmas)
    model = model_config(cfg)
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(1)))
    policy = jax.tree.map(lambda x: jnp.ones(x.shape, cfg.precision.compute_dtype), shapes)
    part = lambda *rows: jax.tree.map(lambda x: x[slice(*rows)], policy["layers"])
    return GainNoise(cfg, model), policy | {"layers": (part(1), part(1, None)) if cut
                                            else (policy["layers"],)}


def gains(policy) -> dict[str, np.ndarray]:
    """[layers, D] of each norm, as one stack."""
    norms: dict[str, list[np.ndarray]] = {"norm": [np.asarray(policy["norm"]["weight"], np.float64)[None]]}
    for stack in policy["layers"]:
        parts = {**stack, **stack["self_attn"]}
        for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"):
            if name in parts:
                norms.setdefault(name, []).append(np.asarray(parts[name]["weight"], np.float64))
    return {name: np.concatenate(stacks) for name, stacks in norms.items()}


def test_sigma_falls_in_stages_from_none():
    noise = Noise(start=1e-2, end=1e-4, stages=10)
    found = [noise.sigma(version, 50) for version in range(50)]
    assert found[:5] == [0] * 5 and found[5:10] == [1e-2] * 5
    np.testing.assert_allclose(found[5::5], 1e-2 * (1e-2) ** (np.arange(9) / 8), rtol=1e-12)
    assert noise.sigma(70, 50) == pytest.approx(1e-4)  # a run that was given more steps
    assert [Noise(start=0.5, end=0.1, stages=2).sigma(v, 4) for v in range(4)] == [0, 0, 0.5, 0.5]
    cfg = settled(config())
    assert cfg.noise.total_steps == 100
    assert [GainNoise(cfg, model_config(cfg)).sigma(v) > 0
            for v in (9, 10, 99, 100)] == [False, True, True, False]


def test_noise_is_drawn_from_seed_and_version_alone():
    """Not from the stacks into which a recipe cuts the layers, nor from what was drawn before."""
    noise, policy = made(*EXACT)
    before = gains(policy)
    drawn = {name: w - before[name] for name, w in gains(noise.added(policy, 20)).items()}
    for name, z in drawn.items():
        assert abs(z.std() / 0.1 - 1) < 5 / np.sqrt(2
                                                    * z.size) and abs(z.mean()) < 0.5 / np.sqrt(z.size), name
        assert len(np.unique(z)) > 0.99 * z.size
    noise.added(policy, 50)
    other, cut = made(*EXACT, cut=True)
    for name, w in gains(other.added(cut, 20)).items():
        np.testing.assert_array_equal(w - before[name], drawn[name])
    again = gains(noise.added(policy, 21))["norm"] - before["norm"]
    assert abs(np.corrcoef(again.ravel(), drawn["norm"].ravel())[0, 1]) < 0.4
    jax.tree.map(np.testing.assert_array_equal, gains(policy), before)


def test_nothing_but_gains_is_another_array():
    noise, policy = made(*EXACT, "--noise.where", "inputs")
    out = noise.added(policy, 20)
    moved = [jax.tree_util.keystr(path) for (path, a), b in
             zip(jax.tree_util.tree_flatten_with_path(policy)[0], jax.tree.leaves(out)) if a is not b]
    assert moved == ["['layers'][0]['input_layernorm']['weight']",
                     "['layers'][0]['post_attention_layernorm']['weight']"]
    assert noise.added(policy, 3) is policy  # the first stage


def test_what_arrives_in_bfloat16_is_what_rounding_leaves():
    """Gains of 1, whose neighbours are 2^-8 below and 2^-7 above: by hand, a Gaussian of 0.01 moves those
    beyond -2^-9 and 2^-8."""
    noise, policy = made(start=0.01, end=0.01)
    moved = gains(noise.added(policy, 20))
    assert set(np.concatenate([w.ravel() for w in moved.values()]) * 256 % 1) == {0.0}
    phi = lambda x: float(jax.scipy.stats.norm.cdf(x))
    assert noise.metrics()["noise/moved"] == pytest.approx(phi(-(2**-9) / 0.01) + phi(-(2**-8) / 0.01),
                                                           abs=0.05)
    found = noise.metrics()
    assert 0.8 < found["noise/arrived"] < 1.1 and found["noise/sigma"] == pytest.approx(0.01)
    swallowed, policy = made(start=5e-4, end=5e-4)
    swallowed.added(policy, 20)
    assert swallowed.metrics()["noise/arrived"] < 1e-3
    with pytest.raises(ConfigError,
                       match='0.0005, is below half a unit.*100% of the gains in bfloat16.*\n.*unit = "ulp"'):
        swallowed.check(policy)
    assert noise.check(policy) is None
    some = jax.tree.map(lambda w: w, policy) | {"norm": {"weight": 4 * policy["norm"]["weight"]}}
    assert "next step" in (noise.check(some) or "")
    for unit, sigma in (("absolute", 1.5), ("ulp", 150.0)):  # a gain of 1 has 128 units
        drowned, policy = made("--noise.unit", unit, start=sigma, end=0.5)
        with pytest.raises(ConfigError, match=f"sigma, {sigma:g}, exceeds most gains"):
            drowned.check(policy)
    units, policy = made("--noise.unit", "ulp", start=2.0, end=2.0)
    assert units.check(policy) is None
    z = np.concatenate([(w - 1).ravel() for w in gains(units.added(policy, 20)).values()])
    assert units.metrics()["noise/arrived"] == pytest.approx(1,
                                                             abs=0.05) and z.std() == pytest.approx(2**-6,
                                                                                                    rel=0.15)


@functools.cache
def sampling() -> tuple[RunContext, dict]:
    words = ("--rollout.prompts_per_step", "8", "--rollout.samples_per_prompt", "4",
             "--rollout.max_new_tokens", "12",
             "--train.rows_per_microbatch", "4")
    ctx = build_run(config(*EXACT, *words, start=0.2, end=0.02))
    return ctx, jax.tree.map(lambda a: 4 * a if jnp.std(a) > 0 else a, ctx.initial_params())


def sampled(ctx: RunContext, version: int):
    requests = scored_groups.make_requests(ctx.train[:8], ctx.sampling, 4, 1, 1)
    kept, _ = scored_groups.generate(ctx.engine, ctx.train[:8], requests, version)
    return pack_samples(ctx, [Sample(p.token_ids, c.token_ids, c.logprobs, 0.0) for p, cs in kept
                                   for c in cs])


def gap(ctx: RunContext, policy, version: int) -> float:
    """The largest distance of engine and learner."""
    batch = sampled(ctx, version)
    return np.abs(np.asarray(ctx.score(policy, batch)) - batch.rollout_logp)[batch.response_mask].max()


def test_an_evaluation_sees_the_policy_itself(monkeypatch):
    ctx, params = sampling()
    policy = ctx.policy(params)
    publishing.publish(ctx, policy, 10, noisy=True)
    monkeypatch.setattr(evaluation, "evaluate", lambda ctx, version: {"eval/gap": gap(ctx, policy, version)})
    found, same = evaluation.evaluate_quietly(ctx, None, policy, 10)
    assert found["eval/gap"] < 2e-5 and same is policy and gap(ctx, policy, 10) > 0.05  # the noise is back


def test_the_mismatch_is_that_of_the_noise():
    """The engine computes with w + Z, and the learner without: k3 is that of the two, by hand, and rises with
    sigma. Without noise they agree again."""
    ctx, params = sampling()
    policy, found = ctx.policy(params), []
    for version in (0, 90, 10):  # none, the least, the most
        publishing.publish(ctx, policy, version, noisy=True)
        batch = sampled(ctx, version)
        live = batch.response_mask
        noisy = ctx.score(ctx.noise.added(policy, version), batch)
        assert np.abs(np.asarray(noisy) - batch.rollout_logp)[live].max() < 2e-5
        old = np.asarray(ctx.score(policy, batch))
        d = (old - batch.rollout_logp)[live].astype(np.float64)
        k3 = np.mean(np.exp(d) - 1 - d)
        rows = np.where(live, old - batch.rollout_logp, 0), old, batch.rollout_logp, live
        assert float(mismatch_metrics(*map(jnp.asarray,
                                           rows))["mismatch/k3"]) == pytest.approx(k3, rel=1e-3, abs=1e-9)
        found.append(k3)
    assert found[0] < 1e-9 < 1e-6 < 10 * found[1] < found[2]
    assert gap(ctx, policy, 10) > 0.05


def test_every_publish_sends_it():
    """Merged adapters and adapters beside the base have the noise of a run without adapters."""
    words = ("--lora.rank", "2", *EXACT)
    for publish in ("adapters", "merged"):
        cfg = config(*words, "--lora.publish", publish)
        ctx = build_run(cfg)
        policy = ctx.policy(ctx.initial_params())
        source = weights_of(cfg, ctx.model, ctx.noise.added(policy, 30), ctx.runs)
        # the base's are Constant
        rows = ((name, getattr(x, "buffer", x)) for name, x in source if "norm" in name)
        sent = {name: np.asarray(x.stack[x.index] if hasattr(x, "stack") else x) for name, x in rows}
        want, plain = gains(ctx.noise.added(policy, 30)), gains(policy)
        np.testing.assert_array_equal(sent["model.norm.weight"], want["norm"][0])
        assert (want["norm"] != plain["norm"]).all()
        np.testing.assert_array_equal(sent["model.layers.1.input_layernorm.weight"],
                                      want["input_layernorm"][1])
        ctx.close()


def test_drafts_are_drawn_with_the_noise_of_what_goes_on():
    ctx = build_run(config(*EXACT, "--selection.explore_samples", "8"))
    policy = ctx.policy(ctx.initial_params())
    publishing.publish(ctx, policy, 30, noisy=True)
    want = gains(ctx.noise.added(policy, 30))["norm"]
    assert (want != gains(policy)["norm"]).all()
    for engine in (ctx.engine, ctx.drafting.engine):
        np.testing.assert_array_equal(np.asarray(engine._params["norm"]["weight"])[None], want)
    ctx.close()


def test_gains_that_are_stored_less_1_take_no_noise_in_their_last_place():
    cfg = config("--noise.unit", "ulp", start=1.0, end=1.0)
    model = model_config(cfg)
    gemma = dataclasses.replace(model, architecture="Gemma3ForCausalLM")
    with pytest.raises(ConfigError, match="Gemma3ForCausalLM stores its gains.*\n.*absolute"):
        check_family(cfg, gemma)
    check_family(cfg, model)
