"""Aggregations: worked by hand, against loops, and independent of the layout."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.losses.aggregation import AGGREGATIONS, check_aggregation, token_scale

pytestmark = pytest.mark.usefixtures("quick_compile")

scale_of = jax.jit(token_scale, static_argnames=("kind", "horizon"))


def horizon(kind):
    return 16.0 if kind == "seq_mean_token_sum_norm" else None


def test_worked_by_hand():
    """Two packed rows: sequences of 3 (2 live), 2 (masked whole), 1 and 4 tokens; N = 7, S = 3."""
    ids = np.array([[1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 0]], np.int32)
    mask = np.array([[1, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]], bool)
    want = {"token_mean": mask / 7, "token_sum": mask * 1.0, "seq_mean_token_sum": mask / 3,
            "seq_mean_token_sum_norm": mask / 48,
            "seq_mean_token_mean": mask / np.array([[6, 6, 6, 1, 1, 1], [3, 12, 12, 12, 12, 1]])}
    assert set(want) == set(AGGREGATIONS)
    for kind, scale in want.items():
        np.testing.assert_allclose(scale_of(mask, ids, kind, horizon(kind)), scale, rtol=1e-6, err_msg=kind)


@given(st.integers(0, 2**32 - 1), st.sampled_from(AGGREGATIONS))
def test_equals_a_loop_over_sequences_wherever_they_lie(seed, kind):
    """The same sequences packed in [2, 2, 20] and one a row in [1, 8, 9]; the sum of scale * loss is the
    loop's."""
    rng = np.random.default_rng(seed)
    parts = [(rng.normal(size=n), rng.random(n) < 0.6) for n in rng.integers(1, 10, 8)]
    live = [x[m] for x, m in parts if m.any()]
    n = sum(map(len, live))
    by_hand = {
        "token_mean": sum(x.sum() for x in live) / max(n, 1),
        "token_sum": sum(x.sum() for x in live),
        "seq_mean_token_sum": sum(x.sum() for x in live) / max(len(live), 1),
        "seq_mean_token_sum_norm": sum(x.sum() for x in live) / max(len(live), 1) / 16,
        "seq_mean_token_mean": sum(x.mean() for x in live) / max(len(live), 1),
    }
    for shape, places in (((1, 8, 9), [(i, 0) for i in range(8)]),
                          ((2, 2, 20), [(i // 2, 10 * (i % 2)) for i in range(8)])):
        ids, mask, loss = np.zeros(shape, np.int32), np.zeros(shape, bool), np.full(shape, np.nan)
        for i, ((row, start), (x, m)) in enumerate(zip(places, parts)):
            at = (*np.unravel_index(row, shape[:2]), slice(start, start + len(x)))
            ids[at], mask[at], loss[at] = i + 1, m, x
        scale = np.asarray(scale_of(mask, ids, kind, horizon(kind)), np.float64)
        assert (scale[~mask] == 0).all()
        np.testing.assert_allclose(np.sum(scale[mask] * loss[mask]), by_hand[kind], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_an_empty_mask_gives_zeros(kind):
    scale = scale_of(np.zeros((2, 6), bool), np.ones((2, 6), np.int32), kind, horizon(kind))
    np.testing.assert_array_equal(scale, np.zeros((2, 6), np.float32))


@pytest.mark.parametrize(
    ("kind", "length", "says"),
    [
        ("token-mean", None, 'did you mean "token_mean"'),
        ("seq_mean_token_sum_norm", None, "horizon of None"),
        ("seq_mean_token_sum_norm", 0.0, "positive number of tokens"),
        ("seq_mean_token_sum_norm", float("inf"), "horizon of inf"),
        ("token_mean", 100.0, 'or choose "seq_mean_token_sum_norm"'),
    ],
)
def test_impossible_settings(kind, length, says):
    with pytest.raises(ValueError, match=says):
        check_aggregation(kind, length)
