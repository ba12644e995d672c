"""The learner's step: no result depends on padding, packing, order or the split into micro-batches, nor on
what is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.losses.aggregation import AGGREGATIONS
from jaxfp8rl.losses.correction import CorrectionConfig, Rejection
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.moe import Routing
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.precision.recipe import Precision
from jaxfp8rl.training.sft import make_sft_step
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from jaxfp8rl.types import TrainBatch

pytestmark = pytest.mark.usefixtures("quick_compile")
LONGEST = 12
MODEL = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)
# compute in float32, weights rounded to bfloat16: the bf16 recipe in float32 mode
FLOAT32 = Precision.uniform(2)
LOGPROBS = make_logprobs(MODEL, FLOAT32, 0.7, remat="none")
KEEP = optax.GradientTransformation(  # moves nothing and leaves the gradients, exact, in opt_state
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, _, __: (jax.tree.map(jnp.zeros_like, grads), grads)
)
ADAM = make_optimizer(Optim(lr=1e-3), 10)  # whose momentum moves weights by itself
policy, score_policy = make_policy(FLOAT32), make_score(LOGPROBS)
train_step = make_train_step(LOGPROBS, FLOAT32, Loss(), CorrectionConfig(), KEEP)
# [M, R, T]: one sequence a row and a micro-batch, padded; packed, split, with room for more than there is
PADDED = (12, 1, LONGEST)
LAYOUTS = (PADDED, (2, 2, 36))


@functools.cache
def params():
    """Matrices four times the usual, so that the distributions are far from uniform and attention is not an
    average."""
    drawn = init_params(MODEL, jax.random.key(0))
    return jax.tree.map(lambda p: 4 * p if jnp.std(p) > 0 else p, drawn)


def samples_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Completions whose engine log-probabilities are some way off the learner's, so that the correction has
    work."""
    rng = np.random.default_rng(seed)
    return [
        Sample(rng.integers(1, 32, p), rng.integers(1, 32, c), -rng.uniform(1, 6, c).astype(np.float32),
           float(rng.normal()))
        for p, c in lengths
    ]


def laid_out(samples: list[Sample], layout: tuple[int, int, int]) -> TrainBatch:
    m, rows, row_tokens = layout
    if row_tokens > LONGEST:
        return pack(samples, row_tokens, rows, m)
    single = [pack([s], row_tokens, 1, 1)
              for s in samples] + [pack([], row_tokens, 1, 1)] * (m * rows - len(samples))
    return jax.tree.map(lambda *fields: np.concatenate(fields).reshape(layout), *single)


def tight_and_loose(samples: list[Sample]) -> tuple[TrainBatch, TrainBatch]:
    """Of one shape, for one program: all in the first micro-batch's rows; in another order over the rows of
    both."""
    tight, halves = laid_out(samples, (2, 2, 36)), (pack(half, 36, 2, 1)
                                                    for half in (samples[1::2], samples[::2][::-1]))
    loose = jax.tree.map(lambda *fields: np.concatenate(fields), *halves)
    assert not tight.response_mask[1].any() and loose.response_mask.any((1, 2)).all()
    return tight, loose


def score(params, batch: TrainBatch) -> np.ndarray:
    return np.asarray(score_policy(policy(params), batch))


def old_logps(params, batch: TrainBatch) -> np.ndarray:
    """The learner's own, off by some tenths that depend on the token alone: some ratios are clipped, some are
    not."""
    return np.asarray(score(params, batch)) + 0.3 * np.sin(batch.tokens + 3.0
                                                           * batch.positions).astype(np.float32)


@functools.cache
def step_of(loss: Loss, correction: CorrectionConfig):
    return make_train_step(LOGPROBS, FLOAT32, loss, correction, KEEP)


def learn(params, batch: TrainBatch, old_logp: np.ndarray, ref_logp=None, step=train_step):
    """(metrics, gradients) of one update."""
    after, _, metrics = step(init_state(jax.tree.map(jnp.copy, params), KEEP), policy(params), batch,
                             old_logp, ref_logp)
    return {k: float(v) for k, v in metrics.items()}, jax.tree.map(np.asarray, after.opt_state)


def distance(a, b) -> float:
    """Of two gradient trees, over the length of the first; 0 when all of a batch is clipped and both are
    zero."""
    flat = [np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)]) for t in (a, b)]
    return float(np.linalg.norm(flat[0] - flat[1]) / max(np.linalg.norm(flat[0]), 1e-12))


def assert_bit_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, LONGEST - 5)), min_size=2, max_size=12)


@settings(max_examples=12)
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


MIXED = samples_of([(2, 1), (3, 7), (1, 2), (5, 5), (2, 6), (4, 4)], seed=1)
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


def near_policy(samples: list[Sample], layout: tuple[int, int, int]) -> list[Sample]:
    """The same completions from an engine near the learner: sequences differ by tenths of nats, not by
    tens."""
    batch = laid_out(samples, layout)
    scores, out = np.asarray(score(params(), batch)), []
    for s in samples:
        m, r, t = (x[0] for x in np.nonzero(batch.rollout_logp == s.logprobs[0]))
        span = slice(t, t + len(s.completion))
        noise = 0.2 * np.sin(np.arange(len(s.completion)) + 2.5 * s.advantage).astype(np.float32)
        out.append(s._replace(logprobs=scores[m, r, span] + noise))
    return out


@pytest.mark.parametrize("preset, objective", [("verl/bypass_pg_is", "reinforce"), ("token_tis", "ppo_clip")])
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


@pytest.mark.parametrize("correction, objective", [("token_k1", "gspo"), ("icepop", "gmpo"), *(
    pytest.param(*more, marks=pytest.mark.slow)
    for more in (("token_k1", "gmpo"), ("icepop", "gspo"), ("icepop", "gspo_token"))
)])
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


def test_a_policy_that_has_not_left_its_reference_pays_nothing():
    batch = laid_out(near_policy(MIXED, (2, 2, 36)), (2, 2, 36))
    old = np.asarray(score(params(), batch))
    metrics, held = learn(params(), batch, old, old, step_of(Loss(kl_coef=1.0), CorrectionConfig()))
    _, free = learn(params(), batch, old)
    assert abs(metrics["kl"]) < 1e-9 and distance(free, held) < 1e-5
    _, away = learn(params(), batch, old, old - 0.5, step_of(Loss(kl_coef=1.0), CorrectionConfig()))
    assert distance(free, away) > 0.1


def test_the_warm_start_is_as_independent_of_the_split():
    step = make_sft_step(LOGPROBS, FLOAT32, KEEP)
    samples = samples_of([(3, 7), (2, 2), (5, 6), (1, 4), (4, 7), (2, 5), (3, 3), (1, 1)])
    results = []
    for batch in tight_and_loose(samples):
        state, metrics = step(init_state(jax.tree.map(jnp.copy, params()), KEEP), batch)
        results.append((state.opt_state, float(metrics["loss"])))
    assert distance(results[0][0], results[1][0]) < 1e-6
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


@settings(max_examples=8)
@given(st.sampled_from([np.nan, np.inf, -np.inf, 1e30]), lengths)
def test_what_stands_under_the_mask_changes_no_bit(value, lengths):
    batch = laid_out(samples_of(lengths), (2, 2, 36))
    old = old_logps(params(), batch)
    metrics, grads = learn(params(), batch, old)
    dead = ~batch.response_mask
    spoilt = batch._replace(
        rollout_logp=np.where(dead, np.float32(value), batch.rollout_logp),
        advantages=np.where(dead, np.float32(value), batch.advantages),
        tokens=np.where(batch.segment_ids == 0, 31, batch.tokens),
        positions=np.where(batch.segment_ids == 0, 7, batch.positions),
    )
    other, other_grads = learn(params(), spoilt, np.where(dead, np.float32(value), old))
    assert metrics == other and np.isfinite(metrics["grad_norm"])
    assert_bit_equal(grads, other_grads)


@pytest.mark.parametrize("field", ["rollout_logp", "advantages", "old_logp"])
def test_a_nan_at_a_live_token_is_seen_and_nothing_is_applied(field):
    batch = laid_out(samples_of([(2, 3), (3, 4)]), (2, 2, 36))
    old = old_logps(params(), batch)
    at = tuple(np.argwhere(batch.response_mask)[2])
    spoilt = {"rollout_logp": batch.rollout_logp.copy(), "advantages": batch.advantages.copy(),
              "old_logp": old.copy()}
    spoilt[field][at] = np.nan
    old = spoilt.pop("old_logp")
    state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
    before = jax.tree.map(np.array, state)
    after, _, metrics = train_step(state, policy(params()), batch._replace(**spoilt), old, None)
    assert metrics["update/applied"] == 0 and metrics["update/bad_in_a_row"] == 1
    assert_bit_equal(before._replace(bad_steps=np.int32(1)), jax.tree.map(np.asarray, after))


def test_a_batch_without_a_token_to_learn_from_changes_nothing():
    batch = laid_out(samples_of([(2, 3), (3, 4)]), (2, 2, 36))
    state = init_state(jax.tree.map(jnp.copy, params()), KEEP)
    before = jax.tree.map(np.array, state)
    empty = batch._replace(response_mask=np.zeros_like(batch.response_mask))
    after, _, metrics = train_step(state, policy(params()), empty, old_logps(params(), batch), None)
    assert metrics["tokens/update"] == 0 and metrics["update/applied"] == 0 and metrics[
        "update/bad_in_a_row"] == 0
    assert_bit_equal(before, jax.tree.map(np.asarray, after))


@functools.cache
def adam_step(loss: Loss, correction: CorrectionConfig, balance_coef: float = 0.0):
    return make_train_step(LOGPROBS, FLOAT32, loss, correction, ADAM, balance_coef=balance_coef)


ICEPOP_NONE = CorrectionConfig(action="mask", lower=0.999, upper=1.001, denominator="all")
REINFORCE_PAIR = Loss(objective="reinforce", old_policy="rollout")
# loss, correction, what the engine's log-probabilities are above the learner's, what becomes of the
# advantages
NOTHING = {
    "all sequences rejected, counted": (Loss(), get_preset("skyrl/geo_mask"), 0.5, np.copy),
    "all tokens masked": (Loss(), ICEPOP_NONE, 0.5, np.copy),
    "all sequences masked for being off-policy": (Loss(opsm_delta=0.1), CorrectionConfig(), 0.5,
                                                  lambda a: -np.abs(a)),
    "all advantages 0": (Loss(), CorrectionConfig(), 0.0, np.zeros_like),
    "all rejected, two policies": (REINFORCE_PAIR, get_preset("verl/bypass_pg_geo_rs"), 0.5, np.copy),
    "all advantages 0, its own old policy": (Loss(old_policy="current"), CorrectionConfig(), 0.0,
                                             np.zeros_like),
}


@pytest.mark.parametrize(
    "case, layout",
    [("all sequences rejected, counted", (1, 4, 36))]
    + [pytest.param(case, layout, marks=pytest.mark.slow) for case in NOTHING
       for layout in ((1, 4, 36), (2, 2, 36))],
)
def test_an_update_whose_gradient_is_0_by_construction_moves_nothing(case, layout):
    """After an update that left momentum behind: neither weights, states nor counters."""
    loss, correction, above, made = NOTHING[case]
    batch = laid_out(samples_of([(3, 5), (2, 6), (4, 4), (1, 7)]), layout)
    step, old = adam_step(loss, correction), score(params(), batch)
    good = batch._replace(rollout_logp=np.where(batch.response_mask, old, 0).astype(np.float32))
    state, now, metrics = step(init_state(jax.tree.map(jnp.copy, params()), ADAM), policy(params()), good,
                               old)
    assert metrics["update/applied"] == 1 and metrics["tokens/update"] == 22 and metrics["grad_norm"] > 1e-3
    before = jax.tree.map(np.array, state)
    old = score(before.params, batch)
    engine = np.where(batch.response_mask, old + above, 0).astype(np.float32)
    bad = batch._replace(rollout_logp=engine, advantages=made(batch.advantages))
    after, _, metrics = step(state, now, bad, old)
    assert metrics["grad_norm"] == 0 and metrics["update/applied"] == 0 and metrics[
        "update/bad_in_a_row"] == 0
    assert metrics["tokens/update"] == 0
    assert_bit_equal(before, jax.tree.map(np.asarray, after))


@pytest.mark.parametrize("coefs",
                         [{"kl_coef": 0.1}, *(pytest.param(more, marks=pytest.mark.slow) for more in (
    {"entropy_coef": 0.1}, {"objective": "prime_rl", "old_policy": "rollout"}))])
def test_a_term_without_an_advantage_is_learned_without_one(coefs):
    batch = laid_out(samples_of([(3, 5), (2, 6)]), (2, 2, 36))
    old = old_logps(params(), batch)
    preset = get_preset("prime_rl/default") if "objective" in coefs else CorrectionConfig()
    step = adam_step(Loss(**coefs), preset)
    state = init_state(jax.tree.map(jnp.copy, params()), ADAM)
    ref = old - 0.1 if "kl_coef" in coefs else None
    _, _, metrics = step(state, policy(params()), batch._replace(advantages=0 * batch.advantages), old, ref)
    assert metrics["grad_norm"] > 1e-6 and metrics["update/applied"] == 1 and metrics["tokens/update"] == 11


@pytest.mark.parametrize(
    "aggregation",
    ["token_sum", *(pytest.param(a, marks=pytest.mark.slow) for a in AGGREGATIONS if a != "token_sum")]
)
def test_the_balance_loss_weighs_the_same_however_losses_are_aggregated(aggregation):
    """Routers that say 1.5 in one micro-batch, of 17 of 28 response tokens, and 1.1 in the other: by hand,
    over tokens. All advantages are 0, and so is the rest of the loss."""
    halves = samples_of([(3, 5), (2, 7), (4, 5)]), samples_of([(1, 7), (3, 4)])
    batch = jax.tree.map(lambda *fields: np.concatenate(fields), *(pack(half, 24, 2, 1) for half in halves))
    assert batch.response_mask.sum((1, 2)).tolist() == [17, 11]
    balance = lambda micro: jnp.where(jnp.sum(micro.response_mask) == 17, 1.5, 1.1)[None]
    routed = lambda policy, micro: (*LOGPROBS(policy, micro)[:2], Routing(None, balance(micro)))
    loss = Loss(aggregation=aggregation, horizon=9 if aggregation.endswith("norm") else None)
    step = make_train_step(routed, FLOAT32, loss, CorrectionConfig(), KEEP, balance_coef=0.5)
    still = batch._replace(advantages=0 * batch.advantages)
    metrics, _ = learn(params(), still, np.where(batch.response_mask, -2.0, 0.0).astype(np.float32),
                       step=step)
    assert metrics["loss"] == pytest.approx(0.5 * (17 * 1.5 + 11 * 1.1) / 28, rel=1e-5)


def test_one_token_with_an_advantage_is_enough_in_whichever_microbatch():
    batch = laid_out(samples_of([(3, 5), (2, 6), (4, 4), (1, 7)] * 2), (2, 2, 36))
    old, at = score(params(), batch), tuple(np.argwhere(batch.response_mask)[-1])
    assert batch.response_mask.any((1, 2)).all() or at[0] == 0
    advantages = np.zeros_like(batch.advantages)
    advantages[at] = 1
    near = batch._replace(rollout_logp=np.where(batch.response_mask, old, 0).astype(np.float32),
                          advantages=advantages)
    _, _, metrics = adam_step(Loss(), CorrectionConfig())(
        init_state(jax.tree.map(jnp.copy, params()), ADAM), policy(params()), near, old
    )
    assert metrics["update/applied"] == 1 and metrics["grad_norm"] > 0 and metrics["tokens/update"] == 44


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
    for seed, lengths in enumerate(([(1, 2), (2, 3)], [(5, 7)] * 12, [(3, 1)] * 5)):
        batch = laid_out(samples_of(lengths, seed), (2, 2, 36))
        state, now, _ = train_step(state, now, batch, score(params(), batch), None)
        sizes.append((score_policy._cache_size(), train_step.__wrapped__._cache_size()))
    assert len(set(sizes)) == 1
