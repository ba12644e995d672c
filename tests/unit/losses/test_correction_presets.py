"""Every preset against an independent float64 oracle, and the metrics against a reference vector."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from correction_oracle import ORACLES
from framework_oracles import skyrl
from preset_batches import BATCHES, SOME, batches, live_ratios

from jaxfp8rl.losses.correction import CorrectionConfig, rollout_correction  # noqa: E402
from jaxfp8rl.losses.presets import PRESETS  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")
MARGIN = 1e-5  # a statistic this close to its bound may fall on either side of it in float32
CASES = ["equal", "empty", "clean", "half"]  # variants of SOME, after the 2 N batches; then those of CALM:
NANS = ["nan_old", "nan_rollout"]


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
        head = f"{layout}: {len(places)} tokens differ, the first [batch, sequence, token]: "
        assert not places, head + "; ".join(
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
