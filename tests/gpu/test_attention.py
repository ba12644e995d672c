"""Packed attention on a Hopper GPU: its numbers, nothing left unwritten, the same every time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.data.trees import ends_of
from pallas_kernels.attention import api, reference

pytestmark = pytest.mark.usefixtures("hopper")

TOKENS = 1200
PACKED = {  # lengths of segments; what is left of the row is padding
    "borders in blocks": [100, 28, 1, 300, 1, 1, 640, 17],
    "one": [TOKENS],
    "whole blocks": [128, 256, 128],
    "many short": [7] * 160,
    "padding": [],
}
GROUPS = {"four heads": (4, 1), "two heads": (4, 2), "a head alone": (2, 2)}  # of a KV head


def ids_of(name: str) -> jax.Array:
    ids = np.repeat(np.arange(len(PACKED[name])) + 1, PACKED[name])
    return jnp.asarray(np.pad(ids, (0, TOKENS - len(ids))), jnp.int32)


def operands(d: int, dtype=jnp.bfloat16, heads=(4, 2), tokens=TOKENS):
    """q, k, v, do and a cotangent for lse."""
    keys, (H, K) = jax.random.split(jax.random.key(0), 5), heads
    drawn = [jax.random.normal(key, (tokens, h, d), dtype) for key, h in zip(keys, (H, K, K, H))]
    return *drawn, jax.random.normal(keys[4], (H, tokens))


def results(ids, q, k, v, do, dlse, **options):
    """o, lse, dq, dk, dv."""

    def f(q, k, v):
        o, lse = api.attention_and_lse(q, k, v, ids, **options)
        return o, jnp.where(getattr(ids, "segment_ids", ids) > 0, lse, 0)

    out, pull = jax.vjp(f, q, k, v)
    return *out, *pull((do, dlse))


@functools.partial(jax.jit, static_argnums=0)
def rounded(dtype, ids, q, k, v, do):
    """The same in float32, but with scores' exponentials, dS and results rounded to `dtype`, as a library in
    that type does."""

    def f(q, k, v):
        mask = reference.visible(ids[None])[0]
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, 1) for x in (k, v))
        s = jnp.einsum("thd,shd->hts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        p = jax.nn.softmax(jnp.where(mask, s, -1e30), -1) * mask
        return jnp.einsum("hts,shd->thd", p.astype(dtype), v,
                          preferred_element_type=jnp.float32).astype(dtype)

    o, pull = jax.vjp(f, q, k, v)
    return o, *pull(do)


kernel = jax.jit(functools.partial(results, backend="pallas"))
_wide = jax.jit(functools.partial(results, backend="reference"))


def float64(ids, *args):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in _wide(ids, *(jnp.asarray(np.asarray(x, np.float64)) for x in args))]


def error(got, want) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / max(np.linalg.norm(want), 1e-30))


@pytest.mark.parametrize(("group", "d"), [*((group, 128) for group in GROUPS), ("four heads", 64),
                                          *((group, 256) for group in GROUPS)])
def test_it_is_as_exact_as_a_bfloat16_reference(group, d):
    args = operands(d, heads=GROUPS[group])
    for name in PACKED:
        ids = ids_of(name)
        got, exact = kernel(ids, *args), float64(ids, *args)
        np.testing.assert_allclose(got[1], exact[1], atol=2e-5, err_msg=name)
        for what, ours, want in zip(("o", "lse", "dq", "dk", "dv"), got, exact):
            assert error(ours, want) < 6e-3, (name, what)
            assert what == "lse" or not np.asarray(ours, np.float32)[np.asarray(ids) == 0].any(), (name, what)
        without = *args[:4], jnp.zeros_like(args[4])  # the plain reference has no lse
        o, _, *grads = zip(kernel(ids, *without), float64(ids, *without))
        for what, (ours, want), plain in zip(("o", "dq", "dk", "dv"), (o, *grads),
                                             rounded(jnp.bfloat16, ids, *args[:4])):
            assert error(ours, want) <= 2 * error(plain, want), (name, what)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("window", [1, 64, 100, 512])
def test_a_window_is_that_of_the_reference(d, window):
    args = operands(d)
    run = lambda backend: jax.jit(functools.partial(results, backend=backend, window=window))
    for name in ("borders in blocks", "one", "many short"):
        ids = ids_of(name)
        for ours, want in zip(run("pallas")(ids, *args), run("reference")(ids, *args)):
            assert error(ours, np.asarray(want, np.float64)) < 8e-3, name


TREES = {  # (length, shared) of sequences in order
    "a group": [(400, 0), *[(380, 299)] * 7],
    "branches of branches": [(500, 0), (480, 400), (700, 420), (300, 64), (100, 0)],
    "nothing shared": [(300, 0), (128, 0), (600, 0)],
}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_a_tree_is_that_of_the_reference_and_shared_tokens_have_the_bits_of_a_plain_row(group, d):
    args = operands(d, heads=GROUPS[group])
    run = lambda backend: jax.jit(lambda ids, ends,
                                  *args: results(api.tables_of(ids, ends=ends), *args, backend=backend))
    for name, members in TREES.items():
        own = [n - shared for n, shared in members]
        pad = (0, TOKENS - sum(own))
        ids = jnp.asarray(np.pad(np.repeat(np.arange(len(own)) + 1, own), pad), jnp.int32)
        ends = jnp.asarray(np.pad(ends_of(members), pad), jnp.int32)
        got, want, plain = run("pallas")(ids, ends, *args), run("reference")(ids,
                                                                             ends, *args), kernel(ids, *args)
        for what, ours, theirs in zip(("o", "lse", "dq", "dk", "dv"), got, want):
            assert error(ours, np.asarray(theirs, np.float64)) < 8e-3, (name, what)
        n = members[0][0]
        np.testing.assert_array_equal(np.asarray(got[0][:n], np.float32),
                                      np.asarray(plain[0][:n], np.float32))
        np.testing.assert_array_equal(got[1][:, :n], plain[1][:, :n])


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (12, 2)])
def test_float16_and_every_group(heads):
    ids, args = ids_of("borders in blocks"), operands(64, jnp.float16, heads)
    for ours, want in zip(kernel(ids, *args), float64(ids, *args)):
        assert error(ours, want) < 1e-3


@pytest.mark.parametrize("d", [64, 128])
def test_exponentials_in_e4m3(d):
    """Short segments: one step of keys, so that its maximum is the row's, to which the reference rounds."""
    ids = ids_of("many short")
    qkv = [x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) for x in operands(d)[:3]]
    got, want, plain = (jax.jit(functools.partial(api.attention, backend=b, fp8=fp8))(*qkv, ids)
                        for b, fp8 in (("pallas", True), ("reference", True), ("reference", False)))
    assert error(got, np.asarray(want, np.float64)) < 2e-3 < 5e-3 < error(plain, np.asarray(want, np.float64))


def test_a_segment_is_as_if_alone():
    """Walks begin elsewhere, so sums are split elsewhere: equal but for roundings."""
    args, at = operands(128), 0
    packed = kernel(ids_of("borders in blocks"), *args)
    for n in PACKED["borders in blocks"]:
        cut = [jnp.roll(x, -at, 0) for x in args[:4]] + [jnp.roll(args[4], -at, 1)]
        alone = kernel(jnp.where(jnp.arange(TOKENS) < n, 1, 0), *cut)
        for i, (x, y) in enumerate(zip(packed, alone)):
            x, y = (x[:, at : at + n], y[:, :n]) if i == 1 else (x[at : at + n], y[:n])
            assert error(x, np.asarray(y, np.float64)) < (1e-5 if i == 1 else 5e-3)
        at += n


def test_rows_of_a_batch_are_apart():
    ids = jnp.stack([ids_of("borders in blocks"), ids_of("one")])
    args = [jnp.stack([x, x[::-1]]) for x in operands(128)[:3]]
    run = jax.jit(functools.partial(api.attention, backend="pallas"))
    both = run(*args, ids)
    for i in range(2):
        assert error(both[i], np.asarray(run(*(x[i] for x in args), ids[i]), np.float64)) < 5e-3


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_finite_reaches_who_sees_it_and_no_one_else(group, d):
    """One number of q, k, v or do, in the middle of a segment. Other segments, padding, and o, lse and dq of
    earlier tokens are as without it, to the bit."""
    ids, args, token = ids_of("borders in blocks"), operands(d, heads=GROUPS[group]), 200
    others, before = np.asarray(ids) != ids[token], np.arange(TOKENS) < token
    rows_first = lambda made: [np.asarray(x.T if x.ndim == 2 else x, np.float32) for x in made]
    want = rows_first(kernel(ids, *args))
    for which, bad in ((0, np.nan), (1, np.nan), (2, np.nan), (2, np.inf), (2, -np.inf), (3, np.inf)):
        spoiled = [x.at[token, 0, 5].set(bad) if i == which else x for i, x in enumerate(args)]
        got = rows_first(kernel(ids, *spoiled))
        for i, (x, y) in enumerate(zip(got, want)):
            np.testing.assert_array_equal(x[others], y[others], err_msg=f"{which, bad, i}")
            if i < 3:
                np.testing.assert_array_equal(x[before], y[before], err_msg=f"{which, bad, i}")
        sees = np.flatnonzero(~others & ~before)
        assert which not in (1, 2) or np.isnan(got[0][sees, 0]).all(), (which, bad)
        assert not all(np.isfinite(x[~others]).all() for x in got), (which, bad)


@pytest.mark.parametrize("group", GROUPS)
def test_the_same_every_time_wherever_it_is_put(group):
    """Results and what lies between are put where memory was all ones, NaN in any type."""
    ids, args = ids_of("borders in blocks"), operands(128, heads=GROUPS[group])
    first = kernel(ids, *args)
    for _ in range(3):
        ones = [jnp.full(x.shape, -1, f"int{8 * x.dtype.itemsize}") for x in (*first, *args)]
        jax.block_until_ready(ones)
        del ones
        for x, y in zip(first, kernel(ids, *args)):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
