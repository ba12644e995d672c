"""Token log-probabilities in chunks against the dense formula."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.losses.logprobs import token_logprobs

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(1, 200), st.floats(0.3, 2.0))
def test_logprobs_equal_the_dense_formula_for_any_chunk(seed, chunk, temperature):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(2, 9, 8)).astype(np.float32), rng.normal(size=(11, 8)).astype(np.float32)
    tokens = rng.integers(11, size=(2, 9))
    logp, entropy = token_logprobs(hidden, head, tokens, temperature, chunk_elements=11 * chunk)
    dense = jax.nn.log_softmax(hidden @ head.T / temperature)
    want = np.take_along_axis(np.asarray(dense)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(logp[:, 1:], want, atol=2e-5)
    np.testing.assert_allclose(entropy[:, 1:], -(np.exp(dense) * dense).sum(-1)[:, :-1], atol=2e-5)
    assert (np.asarray(logp[:, 0]) == 0).all()
