"""Token log-probabilities and entropies, and their gradients, against the dense formula in float64."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.processes import on_devices
from jaxfp8rl.losses.logprobs import logits_of, token_logprobs, token_top_k
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.probes.sharpness import logit_sharpness
from pallas_kernels.logprob import api
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("quick_compile")

seeds = st.integers(0, 2**32 - 1)


def drawn(seed: int, b: int, t: int, d: int, v: int, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(b, t, d)), rng.normal(size=(v, d)) * 4 / d**0.5
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype), jnp.asarray(rng.integers(v, size=(b, t)))


def float64(hidden, head, tokens, temperature, g, h, mask=None, support=None, softcap=None):
    """(logp, entropy, d_hidden, d_head) for cotangents g and h [B, T]; `support` [B, T, V] bool: a softmax
    over these alone; `softcap`: of the logits softcap * tanh(z / softcap)."""
    hidden, head, g, h = (np.asarray(a).astype(np.float64) for a in (hidden, head, g, h))
    live = np.ones(tokens.shape, bool) if mask is None else np.array(mask)
    live[:, 0] = False
    live = live[:, 1:]
    z = hidden[:, :-1] @ head.T
    tanh = np.tanh(z / softcap) if softcap else np.zeros_like(z)
    z = (softcap * tanh if softcap else z) / temperature
    within = np.ones(z.shape, bool) if support is None else support[:, 1:]
    logp = z - z.max(-1, keepdims=True)
    logp = np.where(within, logp - np.log(np.where(within, np.exp(logp), 0).sum(-1, keepdims=True)), 0)
    p, chosen = np.exp(logp), np.arange(head.shape[0]) == np.asarray(tokens)[:, 1:, None]
    p = np.where(within, p, 0)
    entropy = -(p * logp).sum(-1, keepdims=True)
    dz = g[:, 1:, None] * (chosen - p) - h[:, 1:, None] * p * (logp + entropy)
    dz = np.where(live[..., None], dz, 0) / temperature * (1 - tanh**2)
    first = ((0, 0), (1, 0))
    logp, entropy = (np.pad(np.where(live, a, 0), first) for a in ((logp * chosen).sum(-1), entropy[..., 0]))
    return logp, entropy, np.pad(dz @ head,
                                 ((0, 0), (0, 1), (0, 0))), np.einsum("btv,btd->vd", dz, hidden[:, :-1])


@functools.partial(jax.jit, static_argnames=("temperature", "memory", "logits_dtype", "softcap"))
def run(hidden, head, tokens, g, h, mask=None, support=None, **options):
    f = lambda hidden, head: token_logprobs(hidden, head, tokens, mask=mask, support=support, **options)
    found, pull = jax.vjp(f, hidden, head)
    return *found, *pull((g, h))


@pytest.mark.parametrize("f", [token_logprobs, lambda h, w, y, t: token_top_k(h, w, y > 0, 3, t),
                               lambda h, w, y, t: logit_sharpness(h, w, y, y > 0, t)])
def test_greedy_decoding_has_no_log_probabilities(f):
    with pytest.raises(ValueError, match="temperature = 0: logits are divided by a finite number above 0"):
        f(*drawn(0, 1, 3, 4, 5), 0)


def cotangents(seed: int, shape: tuple):
    return (jnp.asarray(a, jnp.float32) for a in np.random.default_rng(seed + 1).normal(size=(2, *shape)))


@given(seeds, st.sampled_from([1, 3, 40]), st.sampled_from([0.3, 1.7]), st.booleans())
@settings(max_examples=20)
def test_values_and_gradients_equal_float64_for_any_chunk(seed, chunk, temperature, masked):
    """Chunks of rows and of words, whole and ragged."""
    hidden, head, tokens = drawn(seed, 2, 9, 8, 11)
    g, h = cotangents(seed, tokens.shape)
    mask = jnp.asarray(np.random.default_rng(seed + 2).random(tokens.shape) < 0.5) if masked else None
    got = run(hidden, head, tokens, g, h, mask, temperature=temperature, memory=20 * chunk)
    for a, b in zip(got, float64(hidden, head, tokens, temperature, g, h, mask)):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, abs(b).max()))
    assert not np.asarray(got[0])[:, 0].any() and not np.asarray(got[1])[:, 0].any()


def supports(rng: np.random.Generator, tokens: np.ndarray, v: int,
             width: int) -> tuple[np.ndarray, np.ndarray]:
    """Supports of 1 to `width` tokens, the sampled one among them: [B, T, V] bool, and as ids [B, T, width]
    in any order."""
    within = rng.random((*tokens.shape, v)).argsort(-1) < rng.integers(0, width, (*tokens.shape, 1))
    np.put_along_axis(within, np.asarray(tokens)[..., None], True, -1)
    ids = np.where(within, np.arange(v), -1)
    return within, rng.permuted(-np.sort(-ids, -1)[..., :width], axis=-1)


@given(seeds, st.booleans())
@example(6640, False)
def test_over_a_support_values_and_gradients_are_of_the_softmax_over_these_tokens_alone(seed, masked):
    hidden, head, tokens = drawn(seed, 2, 9, 8, 11)
    g, h = cotangents(seed, tokens.shape)
    rng = np.random.default_rng(seed + 2)
    mask = jnp.asarray(rng.random(tokens.shape) < 0.5) if masked else None
    within, ids = supports(rng, tokens, 11, 5)
    got = run(hidden, head, tokens, g, h, mask, jnp.asarray(ids), temperature=0.7, memory=60)
    for a, b in zip(got, float64(hidden, head, tokens, 0.7, g, h, mask, within)):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, abs(b).max()))
    alone = jnp.full((*tokens.shape, 5), -1)  # the token itself is always one of them
    logp, entropy, *gradients = run(hidden, head, tokens, g, h, None, alone, temperature=0.7, memory=60)
    assert not logp.any() and not entropy.any()
    assert all(np.abs(a).max() < 2e-5 * np.abs(head).max() for a in gradients)


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("softcap", [2.0, 30.0])
def test_soft_caps_and_their_gradients_equal_float64(softcap, supported):
    """Of logits of up to 15: the lower cap saturates. Chunks of words and rows are ragged."""
    hidden, head, tokens = drawn(5, 2, 9, 8, 11)
    g, h = cotangents(5, tokens.shape)
    within, ids = supports(np.random.default_rng(6), tokens, 11, 5) if supported else (None, None)
    got = run(hidden, head, tokens, g, h, None, ids, temperature=0.7, memory=60, softcap=softcap)
    for a, b in zip(got, float64(hidden, head, tokens, 0.7, g, h, None, within, softcap)):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, abs(b).max()))


@pytest.mark.parametrize("softcap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_soft_cap_is_a_finite_number_above_0(softcap):
    says = f"softcap = {softcap}: logits are capped at a finite number above 0"
    with pytest.raises(ValueError, match=says):
        token_logprobs(*drawn(0, 1, 3, 4, 5), softcap=softcap)


@pytest.mark.parametrize("live", [0.3, 1.0])
def test_the_whole_vocabulary_is_a_support_like_any_other(live):
    """Of rows so many that live ones are sorted out: the numbers are those without one, to the bit."""
    hidden, head, tokens = drawn(2, 3, 1500, 8, 40)
    args = hidden, head, tokens, *cotangents(2, tokens.shape), jnp.asarray(
        np.random.default_rng(3).random(tokens.shape) < live)
    whole = jnp.broadcast_to(jnp.arange(40), (*tokens.shape, 40))
    for a, b in zip(run(*args, whole, memory=4 * 40 * 700), run(*args, memory=4 * 40 * 700)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 3e-3), (jnp.float16, 5e-4)])
def test_of_narrow_inputs_only_gradients_are_rounded(dtype, error):
    """Products of bfloat16 are exact in float32 and summed there; the gradient of the logits is rounded to
    the inputs' type."""
    hidden, head, tokens = drawn(0, 2, 65, 64, 700, dtype)
    g, h = cotangents(0, tokens.shape)
    got, want = run(hidden, head, tokens, g, h, memory=4 * 700 * 40), float64(hidden, head, tokens, 1.0, g, h)
    for a, b in zip(got[:2], want[:2]):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert all(a.dtype == dtype and relative_l2(a, b) < error for a, b in zip(got[2:], want[2:]))


@pytest.mark.parametrize("logits_dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_rounded_as_the_engines_are(logits_dtype):
    """To a last place of float32: log_softmax of what the engine's head leaves, divided by the
    temperature."""
    hidden, head, tokens = drawn(1, 1, 33, 64, 257, jnp.bfloat16)

    @jax.jit
    def both(hidden, head, tokens):
        logits = logits_of(hidden[:, :-1], head)
        logits = logits if logits_dtype == "float32" else round_to(logits, logits_dtype)
        dense = jnp.take_along_axis(jax.nn.log_softmax(logits / 0.7), tokens[:, 1:, None], -1)[..., 0]
        return dense, token_logprobs(hidden, head, tokens, 0.7, logits_dtype=logits_dtype)[0][:, 1:]

    np.testing.assert_allclose(*both(hidden, head, tokens), rtol=5e-7)


@pytest.mark.parametrize("live", [0.0, 0.2, 0.6, 1.0])
def test_rows_off_the_mask_are_nothing_whatever_they_hold(live):
    """With rows enough for a program for each quarter of them."""
    hidden, head, tokens = drawn(2, 3, 1500, 8, 40)
    g, h = cotangents(2, tokens.shape)
    mask = np.random.default_rng(3).random(tokens.shape) < live
    assert len(api._capacities(tokens.size)) > 1
    before = np.roll(mask, -1, 1)[..., None]  # hidden of a masked token is where its predecessor stands
    before[:, -1] = False
    bad = jnp.where(before, hidden, jnp.nan)
    got = run(bad, head, tokens, g, h, jnp.asarray(mask), memory=4 * 40 * 700)
    for a, b in zip(got, float64(hidden, head, tokens, 1.0, g, h, mask)):  # sums of thousands of rows
        np.testing.assert_allclose(a, b, atol=5e-6 * max(10, abs(b).max()))
    assert not np.asarray(got[2])[~before[..., 0]].any()


def test_rows_without_a_cotangent_have_no_part_in_the_gradient():
    """Of these the derivative is not computed, and what they hold does not matter."""
    hidden, head, tokens = drawn(5, 1, 2600, 8, 40)
    g, h = (jnp.where(jnp.arange(2600) % 3 == 0, a, 0.0) for a in cotangents(5, tokens.shape))
    bad = hidden.at[0, 1::3].set(jnp.nan)  # which position 2 of three is computed from
    for a, b in zip(run(bad, head, tokens, g, h)[2:], float64(hidden, head, tokens, 1.0, g, h)[2:]):
        np.testing.assert_allclose(a, b, atol=5e-5)


def test_what_is_not_finite_is_seen_where_it_is():
    hidden, head, tokens = drawn(4, 1, 6, 8, 20)
    logp, entropy = token_logprobs(hidden.at[0, 2, 3].set(jnp.nan), head, tokens)
    np.testing.assert_array_equal(np.isnan(logp[0]), np.arange(6) == 3)
    np.testing.assert_array_equal(np.isnan(entropy[0]), np.arange(6) == 3)


def test_a_target_that_is_no_word_is_not_a_number():
    hidden, head, _ = drawn(6, 1, 5, 8, 20)
    tokens, mask = jnp.asarray([[0, 20, 19, -1, -1]]), jnp.asarray([[True, True, True, True, False]])
    logp, entropy = token_logprobs(hidden, head, tokens, mask=mask)
    np.testing.assert_array_equal(np.isnan(logp[0]), [False, True, False, True, False])
    assert np.isfinite(entropy).all() and logp[0, 4] == 0


def test_a_likely_word_and_one_that_is_out_of_reach():
    """Logits of 1e4 and temperatures of 0.01 neither overflow nor lose the small differences."""
    hidden, head = jnp.ones((1, 2, 1)), jnp.asarray([[1e4], [1e4 - 1], [-1e4]])
    for token, want in ((0, -np.log1p(np.exp(-1))), (1, -1 - np.log1p(np.exp(-1))),
                        (2, -2e4 - np.log1p(np.exp(-1)))):
        logp, entropy = token_logprobs(hidden, head, jnp.full((1, 2), token))
        np.testing.assert_allclose(logp[0, 1], want, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(entropy[0, 1], 0.58220309, atol=1e-6)
    _, _, d_hidden, d_head = run(hidden, head, jnp.full((1, 2), 1), *jnp.ones((2, 1, 2)), temperature=0.01)
    assert np.isfinite(d_hidden).all() and np.isfinite(d_head).all()


def largest_array(text: str) -> int:
    """Elements of the largest array of a compiled program."""
    return max(int(np.prod([int(n) for n in dims.split(",")]))
               for dims in re.findall(r"[a-z]\d+\[([\d,]+)\]", text))


@pytest.mark.parametrize("masked", [False, True])
def test_no_array_is_as_large_as_the_logits(masked):
    struct, (t, d, v) = jax.ShapeDtypeStruct, (4097, 16, 3000)
    row = struct((1, t), jnp.float32)
    args = struct((1, t, d), jnp.float32), struct((v, d), jnp.float32), struct((1, t), jnp.int32), row, row
    mask = struct((1, t), bool) if masked else None
    program = run.lower(*args, mask, memory=2**20).compile()
    assert largest_array(program.as_text()) <= 2**18 < t * v / 40


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from jaxfp8rl.losses.logprobs import token_logprobs, token_top_k

assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("vocab",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 33, 16), (8 * 12, 16)))
tokens, mask = jnp.asarray(rng.integers(96, size=(2, 33))), jnp.asarray(rng.random((2, 33)) < 0.7)
g, h = jnp.asarray(rng.normal(size=(2, 2, 33)), jnp.float32)

def passes(f):
    def both(hidden, head):
        found, pull = jax.vjp(f, hidden, head)
        return found, pull((g, h))
    return jax.jit(both)

few = jnp.asarray(rng.integers(-1, 96, size=(2, 33, 5)))  # on most devices none of a row's
for live, support in ((None, None), (mask, None), (mask, few)):
    options = dict(mask=live, support=support)
    whole = lambda hidden, head: token_logprobs(hidden, head, tokens, 0.7, 1200, **options)
    one = passes(whole)(hidden, head)
    part = lambda hidden, head: token_logprobs(hidden, head, tokens, 0.7, 1200, **options, axis_name="vocab")
    results = (P(), P()), (P(), P("vocab"))
    eight = jax.shard_map(passes(part), mesh=mesh, in_specs=(P(), P("vocab")), out_specs=results,
                          check_vma=False)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(eight(hidden, head))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
top = lambda axis: lambda hidden, head: token_top_k(hidden, head, mask, 5, 0.7, axis_name=axis)
eight = jax.shard_map(top("vocab"), mesh=mesh, in_specs=(P(), P("vocab")), out_specs=(P(), P()),
                      check_vma=False)(hidden, head)
for a, b in zip(jax.jit(top(None))(hidden, head), eight):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
"""


def test_the_likeliest_tokens_are_those_of_the_whole_softmax():
    rng, temperature, k = np.random.default_rng(0), 0.7, 4
    # more rows than a block
    hidden, head = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 130, 16), (50, 16)))
    mask = jnp.asarray(rng.random((3, 130)) < 0.3).at[1, 40:].set(False).at[:, 0].set(True)
    top = jax.jit(functools.partial(token_top_k, k=k, temperature=temperature))
    ids, logp = map(np.asarray, top(hidden, head, mask))
    want = np.asarray(jax.nn.log_softmax(np.asarray(hidden) @ np.asarray(head).T / temperature)[:, :-1])
    live = np.asarray(mask).copy()
    live[:, 0] = False
    for b, t in np.argwhere(live):
        best = np.argsort(-want[b, t - 1])[:k]
        np.testing.assert_array_equal(ids[b, t], best)
        np.testing.assert_allclose(logp[b, t], want[b, t - 1][best], rtol=1e-5, atol=2e-6)
    assert not ids[~live].any() and not logp[~live].any()
    first = token_logprobs(hidden, head, jnp.where(live, ids[..., 0], 0), temperature,
                           mask=jnp.asarray(live))[0]
    np.testing.assert_allclose(first, logp[..., 0], rtol=1e-5, atol=2e-6)


def test_a_vocabulary_over_eight_devices_is_that_of_one():
    on_devices(8, SHARDED)
