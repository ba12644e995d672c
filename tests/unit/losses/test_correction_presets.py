"""Every preset against an independent float64 oracle, and the metrics against a reference vector."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent))
from correction_oracle import ORACLES, mismatch_metrics, sequence_errors, skyrl, weight_metrics  # noqa: E402

from jaxfp8rl.losses.correction import CorrectionConfig, Rejection, rollout_correction  # noqa: E402
from jaxfp8rl.losses.presets import PRESETS  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
BATCHES, SEQUENCES, LENGTH = 600, 4, 8
WIDTH = SEQUENCES * LENGTH  # a row that holds all sequences of a batch
MISMATCH = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 2.0, 10.0, 30.0)  # nats
GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -3.0], np.float32)
MARGIN = 1e-5  # a statistic this close to its bound may fall on either side of it in float32


SOME = slice(1, 1 + 2 * len(MISMATCH))  # batches that the laws below are tried on: each mismatch twice
# those without mismatch, which no preset rejects
CALM = slice(len(MISMATCH), 3 * len(MISMATCH), len(MISMATCH))
CASES = ["equal", "empty", "clean", "half"]  # variants of SOME, after the 2 N batches; then those of CALM:
NANS = ["nan_old", "nan_rollout"]


class Batches(NamedTuple):
    """p, g, mask, segment_ids [2 N + ..., SEQUENCES, WIDTH]: one sequence a row, then the same packed, then
    CASES and NANS.

    where [N, SEQUENCES * WIDTH]: the flat index within its packed batch of each token of the unpacked one.
    """

    p: np.ndarray
    g: np.ndarray
    mask: np.ndarray
    segment_ids: np.ndarray
    where: np.ndarray


@functools.cache
def batches() -> Batches:
    """Seeded; lengths from 0, holes in the mask, empty rows and an empty batch, anything at all under the
    mask."""
    rng = np.random.default_rng(20261121)
    shape = (BATCHES, SEQUENCES, WIDTH)
    lengths = rng.integers(0, LENGTH + 1, (BATCHES, SEQUENCES, 1))
    holes = rng.choice([0.0, 0.3], (BATCHES, 1, 1))
    mask = (np.arange(WIDTH) < lengths) & (rng.random(shape) >= holes)
    mask[0] = False
    scale = np.array(MISMATCH)[np.arange(BATCHES) % len(MISMATCH)].reshape(-1, 1, 1)
    same_sign = rng.random((BATCHES, SEQUENCES, 1)) < 0.3  # one-sided sequences reach large sums
    d = scale * rng.uniform(-1, 1, shape)
    d = np.where(same_sign, np.abs(d), d)
    spikes = rng.random(shape) < 0.05  # calm sequences with a single bad token
    d = np.where(spikes, rng.uniform(-30, 30, shape), d) * (scale > 0)
    top = -rng.exponential(1.0, shape)  # the larger of the two log-probabilities
    p, g = (np.where(mask, top + np.minimum(x, 0), rng.choice(GARBAGE, shape)).astype(np.float32)
            for x in (d, -d))
    segment_ids = np.broadcast_to((np.arange(WIDTH) < lengths).astype(np.int32), shape)

    packed = [np.zeros(shape, a.dtype) for a in (p, g, mask, segment_ids)]
    packed[0][:], packed[1][:] = np.nan, np.inf
    where = np.zeros(shape, int)
    for n in range(BATCHES):
        start = 0
        for i, b in enumerate(rng.permutation(SEQUENCES)):  # into row 0, in any order
            size = int(lengths[n, b, 0])
            here = slice(start, start + size)
            for target, source in zip(packed[:3], (p, g, mask), strict=True):
                target[n, 0, here] = source[n, b, :size]
            packed[3][n, 0, here] = i + 1
            where[n, b, :size] = np.arange(start, start + size)
            start += size
    rows = (p, g, mask, segment_ids)
    special = variants(*(x[SOME] for x in rows)) + nans(*(x[CALM] for x in rows))
    everything = [np.concatenate(x) for x in zip(rows, packed, *special, strict=True)]
    return Batches(*everything, where.reshape(BATCHES, -1))


def variants(p: np.ndarray, g: np.ndarray, mask: np.ndarray, ids: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """CASES: one policy for both; nobody live; nothing odd under the mask; only the first two sequences
    live."""
    half = mask & (np.arange(SEQUENCES)[:, None] < 2)
    clean = (np.where(mask, p, -1), np.where(mask, g, -1))
    return [(p, p, mask, ids), (p, g, np.zeros_like(mask), ids), (*clean, mask, ids), (p, g, half, ids)]


def nans(p: np.ndarray, g: np.ndarray, mask: np.ndarray, ids: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """NANS: a NaN at the first token of the first sequence, which is live; from the learner, then from the
    engine."""
    p, g, mask, ids = (x.copy() for x in (p, g, mask, ids))
    mask[:, 0, :2], ids[:, 0, :2], p[:, 0, :2], g[:, 0, :2] = True, 1, -1.0, -1.0
    broken_p, broken_g = p.copy(), g.copy()
    broken_p[:, 0, 0] = broken_g[:, 0, 0] = np.nan
    return [(broken_p, g, mask, ids), (p, broken_g, mask, ids)]


def case(name: str) -> slice:
    """Where a case lies along the first axis."""
    sizes = [SOME.stop - SOME.start] * len(CASES) + [2] * len(NANS)
    start = 2 * BATCHES + sum(sizes[: (CASES + NANS).index(name)])
    return slice(start, start + sizes[(CASES + NANS).index(name)])


@functools.cache
def ours(config: CorrectionConfig) -> tuple[np.ndarray, np.ndarray]:
    """(weights, mask) [2 N + ..., SEQUENCES, WIDTH], one compilation a config, shared by the presets that are
    alike."""
    arrays = [jnp.asarray(x) for x in batches()[:4]]
    run = jax.jit(jax.vmap(lambda p, g, mask, ids: rollout_correction(p, g, mask, config, ids)[:2]))
    quick = {"xla_backend_optimization_level": 0}  # 45 compilations: half a minute less
    weights, mask = run.lower(*arrays).compile(compiler_options=quick)(*arrays)
    return np.asarray(weights), np.asarray(mask)


def tolerance(config: CorrectionConfig) -> np.ndarray:
    """[N]: 1e-5, plus what a float32 sum of log-ratios loses before exp makes a relative error of its
    absolute one.

    A sum over n tokens rounds by about log2(n) 2^-24 of sum |D|, 2e-7 here: 1e-4 at the 240 nats that 8
    tokens can reach.
    """
    if config.weight != "sequence":
        return np.full(BATCHES, 1e-5)
    d = live_ratios()
    return 1e-5 + 4e-7 * np.max(np.sum(np.abs(d), -1), -1)


@functools.cache
def live_ratios() -> np.ndarray:
    """D [N, SEQUENCES, WIDTH] of the unpacked batches, 0 under the mask."""
    p, g = (np.where(batches().mask, x, 0).astype(np.float64)[:BATCHES] for x in batches()[:2])
    return p - g


def test_every_preset_has_an_oracle_and_every_oracle_a_preset():
    assert set(PRESETS) == set(ORACLES)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_equals_the_oracle(name: str):
    config, data = PRESETS[name], batches()
    weights, counted = ours(config)
    assert np.all(weights[~data.mask] == 0) and not counted[~data.mask].any()
    verdicts = [ORACLES[name](*x) for x in zip(data.p[:BATCHES], data.g[:BATCHES], data.mask[:BATCHES],
                                               strict=True)]
    expected, expected_count, margin = (np.array(x) for x in zip(*verdicts, strict=True))
    clear = margin >= MARGIN
    assert np.mean(clear) > 0.8
    mask, rtol = data.mask[:BATCHES], tolerance(config)[:, None, None]
    packed = [x[BATCHES : 2 * BATCHES].reshape(BATCHES, -1) for x in (weights, counted)]
    packed = [np.take_along_axis(x, data.where, 1).reshape(mask.shape) for x in packed]
    for layout, (w, c) in {"a sequence a row": (weights[:BATCHES], counted[:BATCHES]),
                           "packed": packed}.items():
        # below 1e-8, exp of -20 and beyond, a weight is nothing: clamped and unclamped forms meet there
        wrong = mask & ((c != expected_count) | (np.abs(w - expected) > rtol * np.abs(expected) + 1e-8))
        places = [tuple(i) for i in np.argwhere(wrong & clear[:, None, None])]
        assert not places, f"{layout}: {len(places)} tokens differ, the first [batch, sequence, token]: " + "; ".join(
            f"{i} weight {w[i]:.6g}, oracle {expected[i]:.6g}; counted {c[i]}, oracle {expected_count[i]}"
            for i in places[:3]
        )


def test_weights_of_sequences_are_over_what_the_rejections_left_in_turn():
    """SkyRL's sequence TIS behind its outlier and token masks: a masked token's ratio is in no product."""
    config = PRESETS["skyrl/guide"]._replace(weight="sequence", upper=5.0)
    limits = dict(outliers=(1e-4, 100.0), tokens=(0.5, 2.0))
    data, (weights, _) = batches(), ours(config)
    masks_matter = 0
    for n in range(BATCHES):
        x = data.p[n], data.g[n], data.mask[n]
        want = skyrl(*x, tis="sequence", tis_high=5.0, sequence_mask="geometric", **limits)
        if want.margin > MARGIN:
            np.testing.assert_allclose(weights[n], want.weights, rtol=1e-4, atol=1e-8)
            unmasked = skyrl(*x, tis="sequence", tis_high=5.0, sequence_mask="geometric")
            masks_matter += not np.array_equal(want.weights, unmasked.weights)
    assert masks_matter > 10


def test_the_batches_reach_every_branch():
    """The comparison is worth little if nothing is ever rejected, truncated, or kept."""
    data = batches()
    for name, config in PRESETS.items():
        weights, _ = ours(config)
        live = weights[: 2 * BATCHES][data.mask[: 2 * BATCHES]]
        if config.rejections or config.m2_limit or config.action == "mask":
            assert 0.01 < np.mean(live == 0) < 0.99, name
        if config.weight != "none":
            assert np.ptp(live) > 0, name


# --- laws that hold for each preset
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_equal_policies_leave_the_loss_alone(name: str):
    """Weight exactly 1 at live tokens and nobody left out: the gradient is the uncorrected one, to the last
    bit."""
    (weights, counted), mask = ours(PRESETS[name]), batches().mask[case("equal")]
    assert np.array_equal(weights[case("equal")], mask.astype(np.float32))
    assert np.array_equal(counted[case("equal")], mask)


@pytest.mark.parametrize("name", PRESETS)
def test_an_empty_batch_has_no_weight(name: str):
    weights, counted = ours(PRESETS[name])
    assert not weights[case("empty")].any() and not counted[case("empty")].any()


@pytest.mark.parametrize("name", PRESETS)
def test_what_stands_under_the_mask_changes_nothing(name: str):
    """To the last bit."""
    for dirty in ours(PRESETS[name]):
        assert np.array_equal(dirty[SOME], dirty[case("clean")])
        assert np.all(np.isfinite(dirty[SOME]))


@pytest.mark.parametrize("name", PRESETS)
def test_sequences_are_independent_unless_the_config_needs_the_batch(name: str):
    """`needs_batch` decides who may be corrected by micro-batch: it must not be wrong either way."""
    (weights, counted), live = ours(PRESETS[name]), batches().mask[case("half")]
    alone = np.allclose(weights[SOME][live], weights[case("half")][live], rtol=1e-6, atol=0)
    assert (alone and np.array_equal(counted[SOME] & live,
                                     counted[case("half")])) != PRESETS[name].needs_batch


@pytest.mark.parametrize("name", [n for n, c in PRESETS.items() if c.weight != "none"])
@pytest.mark.parametrize("side", NANS)
def test_a_nan_at_a_live_token_reaches_the_weights(name: str, side: str):
    """So that the finite guard sees it, whatever the bounds. A sequence's weight is NaN at all its tokens."""
    config, (weights, counted) = PRESETS[name], ours(PRESETS[name])
    weights, live = weights[case(side)], batches().mask[case(side)]
    assert np.all(np.isnan(weights[:, 0, 0])) and np.all(counted[case(side)][:, 0, 0])
    if config.needs_segments and config.weight in ("sequence", "geometric"):
        assert np.all(np.isnan(weights[:, 0][live[:, 0]]))
    assert np.all(np.isfinite(weights[~live]))


@pytest.mark.parametrize("name", PRESETS)
def test_weights_keep_within_their_bounds(name: str):
    config, (weights, counted) = PRESETS[name], ours(PRESETS[name])
    healthy = weights[: 2 * BATCHES]
    assert weights.dtype == np.float32 and counted.dtype == bool and np.all(healthy >= 0)
    if config.weight != "none" and not config.batch_normalize and not config.adaptive:
        assert np.max(healthy) <= np.float32(config.upper)
    if config.action == "clip" and not config.batch_normalize:
        assert np.min(healthy[healthy > 0]) >= np.float32(config.lower)


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
        ("abs_logp_diff", 0.478),
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
