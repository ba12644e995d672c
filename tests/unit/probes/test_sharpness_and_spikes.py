"""The sharpness of a policy, and spikes of a series."""

from __future__ import annotations

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.losses.logprobs import logits_of
from jaxfp8rl.monitors.spikes import SpikeCounter
from jaxfp8rl.probes.sharpness import logit_sharpness, sharpness_of

pytestmark = pytest.mark.usefixtures("quick_compile")


# --- sharpness


def test_sharpness_is_the_maximum_over_the_box():
    """Against all corners of the box, where a convex function has its maximum, and points within."""
    rng = np.random.default_rng(0)
    z, epsilon = rng.normal(size=(6, 4)) * 3, 0.01
    targets = rng.integers(0, 4, 6)
    radius = epsilon * (np.abs(z) + 1)

    def loss(z):
        return np.log(np.exp(z).sum(-1)) - z[np.arange(6), targets]

    corners = [loss(z + radius * np.array(signs)) for signs in itertools.product((-1, 1), repeat=4)]
    inside = [loss(z + radius * rng.uniform(-1, 1, z.shape)) for _ in range(200)]
    worst = np.max(corners, 0)
    assert (np.max(inside, 0) <= worst).all()
    got = sharpness_of(jnp.asarray(z, jnp.float32), jnp.asarray(targets), epsilon)
    np.testing.assert_allclose(got, 100 * (worst - loss(z)) / (1 + loss(z)), rtol=1e-4)


def test_sharpness_of_a_batch_is_the_mean_over_live_tokens_and_looks_at_the_token_before():
    rng = np.random.default_rng(1)
    hidden, head = jnp.asarray(rng.normal(size=(2, 9, 8)),
                               jnp.float32), jnp.asarray(rng.normal(size=(17, 8)), jnp.float32)
    tokens, mask = jnp.asarray(rng.integers(0, 17, (2, 9))), jnp.asarray(rng.random((2, 9)) < 0.5).at[
        :, 0].set(False)
    hidden = hidden.at[1, 8].set(jnp.nan)  # the last hidden state predicts nothing
    each = sharpness_of(logits_of(hidden[:, :-1], head) / 0.7, tokens[:, 1:])
    want = np.asarray(each)[np.asarray(mask)[:, 1:]].mean()
    for chunk in (5 * 17, 2**20):
        assert float(logit_sharpness(hidden, head, tokens, mask, 0.7,
                                     chunk_elements=chunk)) == pytest.approx(want, rel=1e-4)


# --- spikes


def test_spikes_are_counted_and_slow_change_is_not():
    rng = np.random.default_rng(0)
    series = 3 - 0.01 * np.arange(200) + 0.05 * rng.normal(size=200)
    spikes = {40: 5.0, 41: 9.0, 120: float("nan"), 150: 5.0, 170: float("inf")}
    series[list(spikes)] = list(spikes.values())
    series[90] = -5.0  # a fall
    counter = SpikeCounter()
    seen = [i for i, x in enumerate(series) if counter.add(x)]
    assert seen == sorted(spikes) and counter.count == len(spikes)
    resumed = SpikeCounter()
    for i, x in enumerate(series):
        if i == 100:
            saved = json.dumps(resumed.state())
            resumed = SpikeCounter()
            resumed.take_up(json.loads(saved))
        assert resumed.add(x) == (i in spikes)
    assert resumed.count == len(spikes)


def test_a_new_level_stops_counting_and_a_constant_series_never_does():
    counter = SpikeCounter(window=20)
    assert not any(counter.add(1.0 + 1e-7 * (i % 3)) for i in range(50))
    assert sum(counter.add(2.0 + 0.01 * (i % 5)) for i in range(60)) <= 11  # half a window and one
    assert not counter.add(2.05)


def test_nothing_counts_before_the_warmup_but_what_is_not_finite():
    counter = SpikeCounter(warmup=5)
    assert [counter.add(x) for x in (1, 50, float("nan"), 2, 90)] == [False, False, True, False, False]
