"""The learner's step: no result depends on padding, packing, order or the split into micro-batches, nor on
what is masked."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_step import (
    FLOAT32,
    KEEP,
    LOGPROBS,
    LONGEST,
    MIXED,
    MODEL,
    REINFORCE_PAIR,
    distance,
    laid_out,
    learn,
    lengths,
    near_policy,
    old_logps,
    params,
    policy,
    samples_of,
    score,
    score_policy,
    step_of,
    train_step,
)

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.training.step import make_train_step
from jaxfp8rl.training.warm_start import make_sft_step
from jaxfp8rl.types import TrainBatch

pytestmark = pytest.mark.usefixtures("quick_compile")
# [M, R, T]: one sequence a row and a micro-batch, padded; packed, split, with room for more than there is
PADDED = (12, 1, LONGEST)
LAYOUTS = (PADDED, (2, 2, 36))


def tight_and_loose(samples: list[Sample]) -> tuple[TrainBatch, TrainBatch]:
    """Of one shape, for one program: all in the first micro-batch's rows; in another order over the rows of
    both."""
    tight, halves = laid_out(samples, (2, 2, 36)), (pack(half, 36, 2, 1)
                                                    for half in (samples[1::2], samples[::2][::-1]))
    loose = jax.tree.map(lambda *fields: np.concatenate(fields), *halves)
    assert not tight.response_mask[1].any() and loose.response_mask.any((1, 2)).all()
    return tight, loose


@settings(max_examples=4)
@given(lengths, st.sampled_from(LAYOUTS), st.randoms(use_true_random=False))
def test_padding_packing_splitting_and_order_change_neither_loss_nor_gradients(lengths, layout, random):
    samples = samples_of(lengths)
    metrics, grads = learn(params(), b := laid_out(samples, PADDED), old_logps(params(), b))
    shuffled = random.sample(samples, len(samples))
    other, other_grads = learn(params(), b := laid_out(shuffled, layout), old_logps(params(), b))
    assert distance(grads, other_grads) < 1e-6
    # The loss is a sum of terms of both signs: 1e-6 of their magnitudes, not of what is left of them.
    magnitude = 2 * np.average([abs(s.advantage) for s in samples],
                               weights=[len(s.completion) for s in samples])
    assert abs(metrics.pop("loss") - other.pop("loss")) < 1e-6 * magnitude
    for key, value in metrics.items():
        atol = 1e-5 if "chi2" in key else 1e-6  # a mean of squared products, less 1
        np.testing.assert_allclose(other[key], value, rtol=1e-5, atol=atol, err_msg=key)


def test_the_invariance_test_sees_a_microbatch_mean():
    """The usual mistake, a mean over each micro-batch, is far outside the tolerance on the same data."""
    samples = samples_of([(2, 1), (3, 7), (1, 2), (5, 5), (2, 6)])
    whole = laid_out(samples, (12, 1, LONGEST))
    old = old_logps(params(), whole)
    _, grads = learn(params(), whole, old)
    parts = []
    for i in range(len(samples)):
        alone = jax.tree.map(lambda f, i=i: np.where(np.arange(12)[:, None, None] == i, f, np.zeros_like(f)),
                             whole)
        parts.append(learn(params(), alone, old)[1])
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *parts)
    assert distance(grads, mean) > 1e-2


KINDS = {
    "GSPO with sequence TIS": (Loss(objective="gspo", aggregation="seq_mean_token_mean"), "sequence_tis"),
    "GMPO, KL and entropy": (
        Loss(objective="gmpo", aggregation="seq_mean_token_sum_norm", horizon=8, kl_coef=0.1,
             unbiased_kl=True,
             entropy_coef=0.05), "icepop",
    ),
    "MIS, normalised": (Loss(aggregation="seq_mean_token_sum"), "slime/mis_sequence"),
    "REINFORCE, two policies, OPSM": (Loss(objective="reinforce", old_policy="rollout", opsm_delta=0.005),
                                      "verl/bypass_pg_is"),
    "prime-rl": (Loss(objective="prime_rl", old_policy="rollout"), "prime_rl/default"),
    "Clip-Cov, NeMo RL's KL, slime's OPSM": (
        Loss(objective="clip_cov", cov_fraction=0.3, cov_low=0.01, cov_high=9.0, kl_coef=0.1, kl="k3_score",
             unbiased_kl=True,
             sampled_by="old", opsm_delta=0.005), "token_tis",
    ),
}
# Each objective in other layouts is in test_objectives.py, each correction in test_correction_laws.py.
SHOWN_IN_PARTS = ("GSPO with sequence TIS", "MIS, normalised", "prime-rl")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SHOWN_IN_PARTS else k
                                  for k in KINDS])
def test_every_kind_of_loss_is_as_independent_of_the_layout(kind):
    loss, preset = KINDS[kind]
    results = []
    for batch in tight_and_loose(near_policy(MIXED, (2, 2, 36))):
        old = old_logps(params(), batch)
        ref = old + 0.1 * np.cos(batch.tokens) if loss.kl_coef else None
        results.append(learn(params(), batch, old, ref, step_of(loss, get_preset(preset))))
    (metrics, grads), (other, other_grads) = results
    assert distance(grads, other_grads) < 2e-6 and metrics["grad_norm"] > 1e-3
    for key, value in metrics.items():
        np.testing.assert_allclose(other[key], value, rtol=2e-5, atol=2e-6, err_msg=key)
    assert loss.opsm_delta is None or loss.sampled_by == "old" or 0.1 < metrics["opsm/fraction"] < 0.9
    assert loss.objective != "clip_cov" or metrics["clip/covariance"] > 0.1


def test_gradients_summed_in_bfloat16_are_near_those_summed_in_float32():
    samples = samples_of([(3, 5), (2, 9), (4, 4), (1, 7), (5, 5), (2, 3)])
    batch = laid_out(samples, (2, 2, 36))  # a shape that other tests have compiled
    old = old_logps(params(), batch)
    narrow = make_train_step(LOGPROBS, FLOAT32, Loss(), CorrectionConfig(), KEEP, gradient_sums="bfloat16")
    metrics, want = learn(params(), batch, old)
    found, got = learn(params(), batch, old, step=narrow)
    assert found["loss"] == metrics["loss"]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert 0 < np.linalg.norm(a - b) < 2.0**-7 * np.linalg.norm(b)


def test_the_warm_start_is_as_independent_of_the_split():
    step = make_sft_step(LOGPROBS, FLOAT32, KEEP)
    samples = samples_of([(3, 7), (2, 2), (5, 6), (1, 4), (4, 7), (2, 5), (3, 3), (1, 1)])
    results = []
    for batch in tight_and_loose(samples):
        state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
        state, _, metrics = step(state, policy(state.params), batch)
        results.append((state.opt_state, float(metrics["loss"])))
    assert distance(results[0][0], results[1][0]) < 1e-6
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


def test_staleness_of_two_policies_is_to_the_engine():
    batch = laid_out(samples_of([(2, 3), (3, 4)]), (2, 2, 36))
    now = np.asarray(score(params(), batch))
    metrics, _ = learn(params(), batch, now, step=step_of(REINFORCE_PAIR, get_preset("verl/bypass_pg_is")))
    want = (batch.rollout_logp - now)[batch.response_mask].mean()
    assert abs(want) > 0.1 and metrics["staleness/k1"] == pytest.approx(want, rel=1e-5)


def test_on_policy_ratios_are_one_and_the_correction_is_neutral():
    """At the weights that sampled, engine and learner in agreement, the loss is minus the mean advantage over
    tokens."""
    batch = laid_out(samples_of([(2, 3), (3, 4), (1, 7)]), (2, 2, 36))
    old = np.asarray(score(params(), batch))
    metrics, _ = learn(params(), batch._replace(rollout_logp=old), old)
    np.testing.assert_allclose(metrics["loss"], -batch.advantages[batch.response_mask].mean(), rtol=1e-5)
    assert metrics["correction/ess"] == 1 and metrics["clip/fraction"] == 0 and metrics[
        "mismatch/max_logp_diff"] == 0
    assert abs(metrics["staleness/k1"]) < 1e-6 and metrics["tokens/update"] == 14


def test_score_is_the_log_softmax_of_the_published_policy_at_the_sampling_temperature():
    """Against a plain forward of one unpacked sequence through the rounded weights."""
    samples = samples_of([(3, 4), (2, 6), (5, 2)])
    scores = np.asarray(score(params(), batch := laid_out(samples, (2, 2, 36))))
    weights = policy(params())
    for s in samples:
        tokens = np.concatenate([s.prompt, s.completion])[None]
        hidden = forward(weights, MODEL, tokens, np.arange(tokens.size)[None], np.ones_like(tokens), FLOAT32)
        table = jax.nn.log_softmax(hidden[0] @ weights["embed_tokens"]["weight"].T / 0.7)
        want = [float(table[t - 1, tokens[0, t]]) for t in range(len(s.prompt), tokens.size)]
        m, r, t = (x[0] for x in np.nonzero(batch.rollout_logp == s.logprobs[0]))
        np.testing.assert_allclose(scores[m, r, t : t + len(want)], want, atol=2e-6)


def test_other_lengths_compile_nothing():
    state, sizes = init_state(jax.tree.map(jnp.copy, params()), KEEP), []
    now = policy(params())
    for seed, drawn in enumerate(([(1, 2), (2, 3)], [(5, 7)] * 12, [(3, 1)] * 5)):
        batch = laid_out(samples_of(drawn, seed), (2, 2, 36))
        state, now, _ = train_step(state, now, batch, score(params(), batch), None)
        sizes.append((score_policy._cache_size(), train_step.__wrapped__._cache_size()))
    assert len(set(sizes)) == 1
