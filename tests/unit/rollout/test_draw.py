"""Drawing by parts of the vocabulary: the distribution, and a head that keeps no logits."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridges.engines.draw import PART, Filters, Parts, draw, draw_by_parts, draw_in_two
from pallas_kernels.logprob import parts
from pallas_kernels.plgpu_compat import INTERPRET

pytestmark = pytest.mark.usefixtures("quick_compile")
WORDS = 2 * PART + 40


def orders(rows: int, temperature: float = 1.0, greedy: bool = False):
    seeds = jnp.stack([jnp.full(rows, 7, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], 1)
    return SimpleNamespace(temperature=jnp.full(rows, temperature), top_k=jnp.full(rows, 5),
                           top_p=jnp.ones(rows),
                           greedy=jnp.full(rows, greedy), seed=seeds)


def softmax(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Log-probabilities [V] in float64 of the top_k tokens, and of these the smallest set of the likeliest
    whose probability reaches top_p."""
    order = np.argsort(-logits)[: top_k or None]
    p = np.exp(logits[order] - logits.max())
    ahead = np.cumsum(p / p.sum()) - p / p.sum()
    kept = order[ahead < top_p]
    found = np.full(len(logits), -np.inf)
    found[kept] = logits[kept] - np.log(np.exp(logits[kept] - logits.max()).sum()) - logits.max()
    return found


MANY = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("by, top_k, top_p, calls", [
    (draw_in_two, 0, 1.0, 1), (draw_in_two, 5, 1.0, 1), (draw_in_two, 0, 0.9, 1), (draw_in_two, 40, 0.7, 1),
    (draw, 0, 1.0, 1), (draw, 40, 0.7, 1), MANY(draw_in_two, 0, 1.0, 100), MANY(draw_in_two, 40, 0.7, 100)])
def test_tokens_are_drawn_from_the_softmax(by, top_k, top_p, calls):
    """10^4 draws, and in the slow form 10^6; chi-squared, over the tokens that are expected often enough."""
    rows = 10_000
    logits = 2 * jax.random.normal(jax.random.key(0), (WORDS,))
    order = orders(rows, 0.8)
    order.top_k, order.top_p = jnp.full(rows, top_k), jnp.full(rows, top_p)
    filters = Filters(top_k or (WORDS if top_p < 1 else 0))
    drawn = jax.jit(lambda t: by(jnp.broadcast_to(logits, (rows, WORDS)), order, jnp.full(rows, t), filters)[:2])
    wanted, seen = softmax(np.asarray(logits, np.float64) / 0.8, top_k, top_p), np.zeros(WORDS, int)
    for t in range(calls):
        token, logp = map(np.asarray, drawn(t))
        np.testing.assert_allclose(logp, wanted[token], atol=2e-5)
        seen += np.bincount(token, minlength=WORDS)
    expected = calls * rows * np.exp(wanted)
    often = expected > 5
    assert not seen[wanted == -np.inf].any() and often.sum() > 3
    assert ((seen - expected)[often] ** 2 / expected[often]).sum() < often.sum() + 5 * np.sqrt(2
                                                                                               * often.sum())
    assert seen[~often].sum() < 1.3 * expected[~often].sum() + 20


@pytest.mark.parametrize("greedy", [False, True])
def test_a_head_that_keeps_no_logits_draws_the_same_tokens(greedy):
    rows, keys = 32, jax.random.split(jax.random.key(1))
    hidden = jax.random.normal(keys[0], (rows, 128)).astype(jnp.bfloat16)
    head = (0.2 * jax.random.normal(keys[1], (WORDS, 128))).astype(jnp.bfloat16)
    order, drawn = orders(rows, 0.7, greedy), jnp.arange(rows)
    by_parts = Parts(lambda w, x, inverse: parts.statistics(x, w, inverse, backend="reference"),
                     lambda w, x, part: parts.logits(x, w, part, backend="reference"))
    token, logp = draw_by_parts(by_parts, head, hidden, order, drawn)
    wanted, its_logp, _ = draw_in_two(parts.reference.logits(hidden, head), order, drawn, Filters())
    np.testing.assert_array_equal(token, wanted)
    np.testing.assert_allclose(logp, its_logp, atol=1e-5)
    if greedy:
        np.testing.assert_array_equal(token, jnp.argmax(parts.reference.logits(hidden, head), -1))


def test_the_kernels_equal_their_references():
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (5, 128)).astype(jnp.bfloat16)
    w = (0.2 * jax.random.normal(keys[1], (PART + 64, 128))).astype(jnp.bfloat16)
    inverse, part = jnp.asarray([1, 0.5, 2, 1, 1], jnp.float32), jnp.asarray([0, 1, 1, 0, 1], jnp.int32)
    for f, by in ((parts.statistics, inverse), (parts.logits, part)):
        made, wanted = f(x, w, by, backend="pallas", interpret=INTERPRET), f(x, w, by, backend="reference")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), made, wanted)
    targets = part * PART + 37  # their logits are those of `logits`, to the bit
    how = dict(backend="pallas", interpret=INTERPRET)
    *found, z = parts.statistics(x, w, inverse, targets, **how)
    np.testing.assert_array_equal(z, parts.logits(x, w, part, **how)[:, 37])
    for a, b in zip(found, parts.statistics(x, w, inverse, **how), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_kernels_lower_for_cuda():
    like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    x, w = like(jnp.bfloat16, 64, 2048), like(jnp.bfloat16, 151936, 2048)
    for f, by in ((parts.statistics, like(jnp.float32, 64)), (parts.logits, like(jnp.int32, 64))):
        traced = jax.jit(lambda *a, f=f: f(*a, backend="pallas")).trace(x, w, by)
        assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
