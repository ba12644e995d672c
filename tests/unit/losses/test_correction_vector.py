"""The metrics against an oracle, and the correction against a reference vector computed by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from correction_oracle import ORACLES
from oracle_parts import mismatch_metrics, sequence_errors, weight_metrics
from preset_batches import BATCHES, batches, live_ratios

from jaxfp8rl.losses.correction import CorrectionConfig, Rejection, rollout_correction  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")


# --- metrics
# --------------------------------------------------------------------------------------------------------


def of_sequences(w: np.ndarray, mask: np.ndarray, kept: np.ndarray) -> dict[str, float]:
    """verl's statistics of sequences, from its definitions: of the sequences with a live token."""
    some = mask.any(-1)
    touched = float(np.mean((mask & ~kept).any(-1)[some]))
    means = [row[k].mean() for row, k in zip(w, kept) if k.any()]
    named = {"mean": np.mean(means), "std": np.std(means), "max": max(means), "min": min(means),
             "max_deviation": max(abs(m - 1) for m in means)}
    return {f"correction/sequence_weight_{k}": float(v) for k, v in named.items()} | {
        "correction/rejected_sequences": touched, "correction/rejected_sequences/token_k2": touched,
        "correction/lost_sequences": float(np.mean(~kept.any(-1)[some])),
    }


def test_metrics_equal_the_oracle():
    """Against the raw formulas where log-ratios stay within +-20, past which ours are clamped. Unpacked and
    packed.

    Mismatch and raw weights are those of all live tokens, the statistics of the weights applied those of the
    kept ones.
    """
    names = {
        "kl": "k1", "k3": "k3", "policy_k3": "k3_reverse", "js": "js", "abs": "abs_logp_diff",
        "max_abs": "max_logp_diff",
        "mult_prob_error": "token_mult_prob_error", "max_prob_diff": "prob_diff_max",
        "mean_prob_diff": "prob_diff_mean",
        "training_ppl": "learner_ppl", "rollout_ppl": "rollout_ppl", "ppl_ratio": "ppl_ratio",
        "log_ppl_diff": "log_ppl_diff_mean", "log_ppl_abs_diff": "log_ppl_diff_abs_mean",
        "log_ppl_diff_max": "log_ppl_diff_max", "log_ppl_diff_min": "log_ppl_diff_min",
        "chi2_token": "chi2_token",
        "chi2_sequence": "chi2_seq",
    }
    data, config = batches(), CorrectionConfig(upper=2.0, rejections=(Rejection("token", "k2", upper=1.0),))
    run = jax.jit(jax.vmap(lambda p, g, mask, ids: rollout_correction(p, g, mask, config, ids)))
    result = run(*(jnp.asarray(x[: 2 * BATCHES]) for x in data[:4]))
    metrics = {k: np.asarray(v) for k, v in result.metrics.items()}
    moderate = [n for n in range(BATCHES) if data.mask[n].any() and np.max(np.abs(live_ratios()[n])) < 19.9]
    assert len(moderate) > BATCHES / 4
    for n in moderate:
        p, g, mask = data.p[n], data.g[n], data.mask[n]
        expected = mismatch_metrics(p, g, mask)
        w, raw = np.asarray(result.weights[n], np.float64), np.exp(live_ratios()[n])
        kept = mask & (live_ratios()[n] ** 2 / 2 <= 1.0)
        if not kept.any():
            continue
        ours_by_key = {f"mismatch/{names[k]}": expected[k] for k in names}
        ours_by_key |= {f"correction/weight_{k}": v for k, v in weight_metrics(w, kept).items() if k != "ess"}
        ours_by_key |= {f"correction/raw_weight_{k}": v for k, v in weight_metrics(raw, mask).items()
                        if k != "ess"}
        ours_by_key |= {
            "correction/ess": weight_metrics(w, kept)["ess"],
            "correction/raw_ess": weight_metrics(raw, mask)["ess"],
            "mismatch/seq_mult_prob_error_max": max(sequence_errors(p, g, mask)),
            "correction/truncated_fraction": float(np.mean(raw[mask] > 2.0)),
            "correction/rejected_fraction": float(np.mean(~kept[mask])),
            "correction/rejected/token_k2": float(np.mean(~kept[mask])),
        }
        ours_by_key |= of_sequences(w, mask, kept)
        for key, value in ours_by_key.items():
            for where in (n, BATCHES + n):
                # sums of 8 log-ratios of 20 nats round by 1e-5, and chi2_seq doubles that in its exponent
                assert metrics[key][where] == pytest.approx(value, rel=3e-4, abs=2e-6), (key, n)


# --- the reference vector: 3 sequences, computed by hand from the formulas in float64
# ---------------------------------

P = np.array([[-0.10, -1.20, -0.50, -2.00], [-0.30, -0.05, -4.00, -0.70], [-1.00, -0.20, -9, -9]], np.float32)
G = np.array([[-0.12, -1.00, -0.55, -1.10], [-0.30, -0.06, -1.50, -0.75], [-2.00, -0.25, -1, -1]], np.float32)
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
IDS = np.ones((3, 4), np.int32)
RHO = [1.020201, 0.818731, 1.051271, 0.406570, 1, 1.010050, 0.082085, 1.051271, 2.718282, 1.051271]


def correct(config: CorrectionConfig):
    return rollout_correction(jnp.asarray(P), jnp.asarray(G), jnp.asarray(MASK), config, jnp.asarray(IDS))


@functools.cache
def vector_metrics() -> dict[str, float]:
    return {k: float(v) for k, v in correct(CorrectionConfig()).metrics.items()}


def six_digits(value: float) -> object:
    return pytest.approx(value, rel=0, abs=6e-7 * max(1.0, abs(value)))


def test_reference_vector_weights():
    raw = correct(CorrectionConfig(upper=100.0))
    np.testing.assert_allclose(raw.weights[MASK], RHO, atol=6e-7)
    assert raw.metrics["correction/raw_weight_mean"] == six_digits(1.020973)
    tis = correct(CorrectionConfig())
    np.testing.assert_allclose(tis.weights[MASK], np.minimum(RHO, 2.0), atol=6e-7)
    # the vector says .949145: mean of the ten above
    assert tis.metrics["correction/weight_mean"] == six_digits(0.949145)
    assert tis.metrics["correction/ess"] == six_digits(0.803000)
    assert tis.metrics["correction/truncated_fraction"] == six_digits(0.1)


def test_reference_vector_icepop():
    pop = correct(CorrectionConfig(action="mask", lower=0.5, upper=5.0))
    np.testing.assert_allclose(pop.weights[MASK], [0 if r in (0.406570, 0.082085) else r for r in RHO],
                               atol=6e-7)
    assert np.array_equal(pop.mask, MASK)
    assert float(pop.metrics["correction/below_fraction"]
                 + pop.metrics["correction/truncated_fraction"]) == six_digits(0.2)


def test_reference_vector_sequence_weights():
    sequence = correct(CorrectionConfig("sequence"))
    np.testing.assert_allclose(sequence.weights[:, 0], [0.357007, 0.087161, 2.0], atol=6e-7)
    geometric = correct(CorrectionConfig("geometric"))
    np.testing.assert_allclose(geometric.weights[:, 0], [0.772982, 0.543351, 1.690459], atol=6e-7)
    for t in (1, 2, 3):
        live = MASK[:, t]
        assert np.array_equal(sequence.weights[live, t], sequence.weights[live, 0])


@pytest.mark.parametrize(
    ("aggregation", "statistic", "values"),
    [
        ("mean", "k3", (0.081693, 0.395852, 0.359776)), ("sum", "k2", (0.42645, 3.1263, 0.50125)),
        ("max", "k2", (0.405, 3.125, 0.5)), ("sum", "k1", (-1.03, -2.44, 1.05)),
        ("mean", "ratio", (0.772982, 0.543351, 1.690459)),
        ("mean", "mult_error", (1.438120, 3.810954, 1.884776)),
        ("min", "ratio", (0.406570, 0.082085, 1.051271)), ("max", "ratio", (1.051271, 1.051271, 2.718282)),
    ],
)
def test_reference_vector_sequence_statistics(aggregation: str, statistic: str, values: tuple[float, ...]):
    """A statistic is not returned, but bounds a few 1e-7 around its value keep just the sequences that have
    it."""
    for value in values:
        r = Rejection("sequence", statistic, aggregation, value - 2e-6, value + 2e-6)
        kept = correct(CorrectionConfig("none", rejections=(r,))).mask
        same = [abs(v - value) < 1e-6 for v in values]
        assert np.array_equal(kept, MASK & np.array(same)[:, None])


def test_reference_vector_token_rejection_and_veto():
    k1 = Rejection("token", "k1", lower=float(np.log(0.5)), upper=float(np.log(2.0)), inverse=True)
    kept = correct(CorrectionConfig("none", rejections=(k1,)))
    assert np.array_equal(kept.mask, [[1, 1, 1, 0], [1, 1, 0, 1], [0, 1, 0, 0]])
    assert kept.metrics["correction/rejected_fraction"] == six_digits(0.3)
    veto = correct(CorrectionConfig("none", rejections=(Rejection("sequence", "ratio", "min", lower=0.1),)))
    assert np.array_equal(veto.mask, MASK & np.array([1, 0, 1], bool)[:, None])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k1", 0.242), ("k3", 0.262973), ("learner_ppl", 2.647358), ("rollout_ppl", 2.333086),
        ("ppl_ratio", 1.241893),
        ("log_ppl_diff_mean", 0.114167), ("log_ppl_diff_abs_mean", 0.464167), ("log_ppl_diff_max", 0.61),
        ("log_ppl_diff_min", -0.525), ("chi2_token", 0.460794), ("chi2_seq", 1.767074),
        ("k3_reverse", 0.963532),
        ("token_mult_prob_error", 2.476585), ("seq_mult_prob_error_max", 3.810954), ("max_logp_diff", 2.5),
        ("abs_logp_diff", 0.478), ("equal_fraction", 0.1),
    ],
)
def test_reference_vector_metrics(key: str, value: float):
    assert vector_metrics()[f"mismatch/{key}"] == six_digits(value)


def test_the_oracle_reproduces_the_reference_vector():
    """The oracle has to be right before anything is compared with it."""
    metrics = mismatch_metrics(P, G, MASK)
    expected = {
        "kl": 0.242, "k3": 0.262973, "policy_k3": 0.963532, "mult_prob_error": 2.476585, "rho_mean": 1.020973,
        "training_ppl": 2.647358, "rollout_ppl": 2.333086, "ppl_ratio": 1.241893, "log_ppl_diff": 0.114167,
        "chi2_token": 0.460794, "chi2_sequence": 1.767074,
    }
    assert {k: metrics[k] for k in expected} == {k: six_digits(v) for k, v in expected.items()}
    assert sequence_errors(P, G, MASK) == [six_digits(v) for v in (1.438120, 3.810954, 1.884776)]
    weights = ORACLES["verl/decoupled_token_is"](P, G, MASK).weights
    assert weight_metrics(weights, MASK)["ess"] == six_digits(0.803000)
    np.testing.assert_allclose(ORACLES["verl/decoupled_seq_is"](P, G, MASK).weights[:, 0],
                               [0.357007, 0.087161, 2], atol=1e-6)
