"""What the old policy, a rejection, or a weight of 0 makes of an update."""


import jax
import numpy as np
import pytest
from learner_step import MIXED, distance, laid_out, learn, near_policy, old_logps, params, score, step_of

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import pack
from jaxfp8rl.losses.correction import CorrectionConfig, Rejection
from jaxfp8rl.losses.presets import get_preset

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("preset, objective", [
    pytest.param("verl/bypass_pg_is", "reinforce", marks=pytest.mark.slow),
    pytest.param("token_tis", "ppo_clip", marks=pytest.mark.slow)])
def test_two_policies_learn_what_three_do_while_the_policy_has_not_moved(preset, objective):
    """REINFORCE, its weight worked out from pi a micro-batch at a time, and an objective of three policies
    whose pi_old = pi, its weight worked out once."""
    batch = laid_out(near_policy(MIXED, (2, 2, 36)), (2, 2, 36))
    preset = get_preset(preset)
    two = learn(params(), batch, batch.rollout_logp,
                step=step_of(Loss(objective="reinforce", old_policy="rollout"), preset))
    three = learn(params(), batch, np.asarray(score(params(), batch)),
                  step=step_of(Loss(objective=objective), preset))
    assert distance(two[1], three[1]) < 1e-6
    own = ("loss",) if objective == "reinforce" else ()  # PPO's has another value, and the same gradient
    for key in (*own, "mismatch/k3", "mismatch/chi2_seq", "correction/ess", "mismatch/skew_negative"):
        np.testing.assert_allclose(two[0][key], three[0][key], rtol=1e-5, err_msg=key)
    assert two[0]["mismatch/k3"] > 1e-3  # not neutral


@pytest.mark.parametrize("preset, objective", [("token_tis", "ppo_clip"), *(
    pytest.param(*more, marks=pytest.mark.slow) for more in (("sequence_tis", "gspo"), ("icepop", "cispo")))])
def test_an_update_that_is_its_own_old_policy_is_the_one_that_was_scored(preset, objective):
    """At the weights that were scored: the same loss, gradient and metrics, whatever it is told of old
    log-probabilities."""
    batch, correction = laid_out(near_policy(MIXED, (2, 2, 36)),
                                 (2, 2, 36)), get_preset(preset)._replace(denominator="all")
    own = learn(params(), batch, batch.rollout_logp,
                step=step_of(Loss(objective=objective, old_policy="current"), correction))
    scored = learn(params(), batch, np.asarray(score(params(), batch)),
                   step=step_of(Loss(objective=objective), correction))
    assert distance(own[1], scored[1]) < 1e-6
    for key, value in scored[0].items():
        np.testing.assert_allclose(own[0][key], value, rtol=1e-5, atol=1e-7, err_msg=key)
    assert own[0]["mismatch/k3"] > 1e-3 and own[0]["clip/fraction"] == 0


@pytest.mark.parametrize("denominator", ["kept", pytest.param("all", marks=pytest.mark.slow)])
def test_a_rejected_sequence_is_as_if_it_had_not_been_sampled(denominator):
    """Exactly so when it leaves the denominator; when it stays, the gradient shrinks by its share of the
    tokens."""
    layout = (2, 2, 36)
    good = near_policy(MIXED, layout)
    bad = good[1]._replace(logprobs=good[1].logprobs - 3)  # 7 of 25 tokens
    reject = CorrectionConfig(denominator=denominator,
                              rejections=(Rejection("sequence", "ratio", "mean", 0.5, 2.0),))
    results = []
    for samples in ([good[0], bad, *good[2:]], [good[0], *good[2:]]):
        batch = laid_out(samples, layout)
        results.append(learn(params(), batch, old_logps(params(), batch), step=step_of(Loss(), reject)))
    (metrics, grads), (_, without) = results
    share = 1 if denominator == "kept" else 18 / 25
    assert distance(grads, jax.tree.map(lambda g: share * g, without)) < 1e-6
    assert metrics["correction/rejected_fraction"] == pytest.approx(7 / 25)


@pytest.mark.slow  # tests/unit/losses has the means of sequences without a model
@pytest.mark.parametrize("correction, objective", [
    ("token_k1", "gspo"), ("token_k1", "gmpo"), ("icepop", "gspo"), ("icepop", "gspo_token"),
    ("icepop", "gmpo")])
def test_the_ratio_of_a_rejected_token_is_in_no_mean_of_its_sequence(correction, objective):
    """Though it stays in the denominator: what it would say of its sequence changes no gradient."""
    reject = CorrectionConfig(denominator="all", rejections=(Rejection("token", "k1", "mean", -2.0, 2.0),))
    config = reject if correction == "token_k1" else get_preset(correction)
    samples = near_policy(MIXED, (2, 2, 36))
    samples[1].logprobs[[0, 3]] -= 8
    batch = laid_out(samples, (2, 2, 36))
    old = old_logps(params(), batch)
    gone = batch.response_mask & (old - batch.rollout_logp > 4)
    loss = Loss(objective=objective, clip_low=0.9, clip_high=0.9)
    results = [learn(params(), batch, np.where(gone, old + more, old), step=step_of(loss, config))
               for more in (0, 2)]
    assert gone.sum() == 2 and distance(results[0][1], results[1][1]) == 0 < results[0][0]["grad_norm"]
    if correction == "token_k1":
        _, kept = learn(params(), batch, old, step=step_of(loss, config._replace(denominator="kept")))
        share = 1 - gone.sum() / batch.response_mask.sum()
        assert distance(results[0][1], jax.tree.map(lambda g: share * g, kept)) < 1e-6


def test_a_sequence_masked_for_being_off_policy_stays_in_the_denominator_and_teaches_nothing():
    """As with an advantage of 0; those that were good are learned from, however far they are. What a
    rejection takes out still says how far its sequence is: the second is by one token."""
    samples = near_policy(MIXED, (2, 2, 36))
    far = [s._replace(logprobs=s.logprobs + (0.5 if i % 3 else -0.5), advantage=0.5 - i % 2)
           for i, s in enumerate(samples)]
    far[1] = samples[1]._replace(logprobs=samples[1].logprobs + np.float32([8, 0, 0, 0, 0, 0, 0]),
                                 advantage=-0.5)
    masked = [i % 3 != 0 and i % 2 == 1 for i in range(len(far))]
    reject = CorrectionConfig(rejections=(Rejection("token", "k1", "mean", -2.0, 2.0),))
    left = [s._replace(advantage=0.0) if gone else s for s, gone in zip(far, masked)]
    batch, zeroed = (laid_out(x, (2, 2, 36)) for x in (far, left))
    old = np.asarray(score(params(), batch))
    metrics, grads = learn(params(), batch, old, step=step_of(Loss(opsm_delta=0.3), reject))
    other, wanted = learn(params(), zeroed, old, step=step_of(Loss(), reject))
    assert distance(grads, wanted) < 1e-6 and metrics["loss"] == pytest.approx(other["loss"], rel=1e-5)
    lengths = [len(s.completion) - (i == 1) for i, s in enumerate(far)]
    assert metrics["opsm/fraction"] == pytest.approx(sum(n for n, gone in zip(lengths, masked) if gone)
                                                     / sum(lengths))
    assert 0.1 < metrics["opsm/fraction"] < 0.9


@pytest.mark.slow  # the test before has the mask of one of the two
def test_whose_samples_off_policy_masking_takes_them_for():
    """An engine half a nat above pi in every token, and pi_old = pi: DeepSeek's mask has all with A < 0,
    slime's none."""
    batch = laid_out(near_policy(MIXED, (2, 2, 36)), (2, 2, 36))
    old = np.asarray(score(params(), batch))
    batch = batch._replace(rollout_logp=np.where(batch.response_mask, old + 0.5, 0).astype(np.float32))
    bad = (batch.advantages < 0)[batch.response_mask].mean()
    for sampled_by, share in (("rollout", bad), ("old", 0.0)):
        step = step_of(Loss(opsm_delta=0.3, sampled_by=sampled_by), CorrectionConfig())
        assert learn(params(), batch, old, step=step)[0]["opsm/fraction"] == pytest.approx(share), sampled_by


def test_a_token_of_weight_0_is_as_if_it_had_not_been_sampled_and_one_of_weight_3_counts_thrice():
    """prime-rl's streams of weights: a weight scales the loss, and counts once in the denominator unless it
    is 0."""
    samples = near_policy(MIXED, (2, 2, 36))
    weighed = [s._replace(weights=np.full(len(s.completion), 3.0 if i else 0.0, np.float32))
               for i, s in enumerate(samples)]
    weighed[1] = weighed[1]._replace(weights=None)  # all 1
    step = step_of(Loss(objective="reinforce"), CorrectionConfig())
    results = []
    for chosen in (weighed, samples[1:], samples[1:2], samples[2:]):
        batch = laid_out(chosen, (2, 2, 36))
        results.append(learn(params(), batch, np.asarray(score(params(), batch)), step=step))
    (metrics, grads), (without, _), (_, one), (_, rest) = results
    tokens = [len(s.completion) for s in samples]
    share = tokens[1] / sum(tokens[1:])  # token_mean's denominators are those of each batch
    assert distance(grads, jax.tree.map(lambda a, b: share * a + 3 * (1 - share) * b, one, rest)) < 1e-6
    assert metrics["tokens/update"] == without["tokens/update"] == sum(tokens[1:])


@pytest.mark.slow  # tests/unit/losses/test_kl.py has the estimators at d = 0
def test_a_policy_that_has_not_left_its_reference_pays_nothing():
    batch = laid_out(near_policy(MIXED, (2, 2, 36)), (2, 2, 36))
    old = np.asarray(score(params(), batch))
    metrics, held = learn(params(), batch, old, old, step_of(Loss(kl_coef=1.0), CorrectionConfig()))
    _, free = learn(params(), batch, old)
    assert abs(metrics["kl"]) < 1e-9 and distance(free, held) < 1e-5
    _, away = learn(params(), batch, old, old - 0.5, step_of(Loss(kl_coef=1.0), CorrectionConfig()))
    assert distance(free, away) > 0.1


@pytest.mark.slow
def test_a_log_linear_proximal_policy_is_the_engines_for_fresh_tokens_and_moves_with_their_age():
    """Of age 0 it is the two policies' PPO. Of a great age it is pi itself, which "current" takes."""
    layout = (2, 2, 36)
    samples = near_policy(MIXED, layout)
    learned = {}
    for age in (0, 1, 1e9):
        aged = [s._replace(ages=np.full(len(s.completion), age, np.float32)) for s in samples]
        batch = pack(aged, layout[2], layout[1], layout[0], ages=True)
        learned[age] = learn(params(), batch, batch.rollout_logp,
                             step=step_of(Loss(old_policy="loglinear"), CorrectionConfig()))
    plain = laid_out(samples, layout)
    none = CorrectionConfig(weight="none")
    for age, loss, correction in ((0, Loss(old_policy="rollout"), none),
                                  (1e9, Loss(old_policy="current"), CorrectionConfig())):
        other = learn(params(), plain, plain.rollout_logp, step=step_of(loss, correction))
        assert distance(other[1], learned[age][1]) < 1e-5
    assert distance(learned[0][1], learned[1][1]) > 1e-3
    assert learned[0][0]["correction/weight_std"] == 0 < learned[1][0]["correction/weight_std"]
    with pytest.raises(ValueError, match="ages=True"):
        learn(params(), plain, plain.rollout_logp,
              step=step_of(Loss(old_policy="loglinear"), CorrectionConfig()))
