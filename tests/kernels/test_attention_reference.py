"""Packed attention's oracle, and the walks of its kernels, against every segment on its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.data.trees import ends_of
from jaxfp8rl.models import layers
from pallas_kernels.attention import api, reference
from pallas_kernels.attention.segments import STEP, first_and_last, key_walks, query_walks, seen_by, sees
from pallas_kernels.testing import segment_ids

pytestmark = pytest.mark.usefixtures("quick_compile")

TOKENS = 24


LENGTHS = 0, 1, 2, 63, 64, 65, 100, 127, 128, 129, 200, 300
packs = segment_ids(TOKENS, lengths=range(10))
long_packs = segment_ids(768, 9, LENGTHS, max_front=130)


def drawn(heads: int, kv_heads: int, d: int = 8):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (TOKENS, h, d))
            for key, h in zip(keys, (heads, kv_heads, kv_heads, heads))]


def run(ids, q, k, v, do):
    """o, lse, dq, dk, dv."""

    def f(q, k, v):
        o, lse = api.attention_and_lse(q, k, v, ids, backend="reference")
        return o, jnp.where(jnp.expand_dims(ids, -2) > 0, lse, 0)

    out, pull = jax.vjp(f, q, k, v)
    return *out, *pull((do, jnp.ones_like(out[1])))


run_all, segments_jit, visible_jit = jax.jit(run), jax.jit(first_and_last), jax.jit(reference.visible)
windows = st.sampled_from([None, 1, 2, 7, 64, 100, 129, 10**9])
keys_jit, queries_jit = (jax.jit(f, static_argnums=1) for f in (key_walks, query_walks))


@given(packs, st.sampled_from([(4, 2), (3, 1)]))
def test_packed_equals_every_segment_alone(ids, heads):
    """And what is packed beside a segment does not reach it."""
    args = [np.asarray(x) for x in drawn(*heads)]
    got = [np.asarray(x) for x in run_all(ids, *args)]
    for segment in np.unique(ids[ids > 0]):
        mine = ids == segment
        alone = run_all(mine.astype(np.int32),
                        *(np.where(mine[:, None, None], x, np.float32(7)) for x in args))
        for i, (x, y) in enumerate(zip(got, map(np.asarray, alone))):
            np.testing.assert_allclose(x[:, mine] if i == 1 else x[mine], y[:, mine] if i == 1 else y[mine],
                                       atol=3e-6)
    for i in (0, 2, 3, 4):
        assert not got[i][ids == 0].any()


places = st.tuples(st.integers(0, 3), st.integers(0, TOKENS - 1), st.integers(0, 3), st.integers(0, 7))
BY = {
    "the reference": api.attention_and_lse,
    "the reference in FP8": functools.partial(api.attention_and_lse, fp8=True),
    "the model's": lambda q, k, v, ids: (layers.attention(q[None], k[None], v[None],
                                                          layers.attention_mask(ids[None]))[0],),
}


@functools.partial(jax.jit, static_argnums=0)
def by(name, ids, q, k, v, do):
    """o, dq, dk, dv."""
    o, pull = jax.vjp(lambda *qkv: BY[name](*qkv, ids)[0], q, k, v)
    return o, *pull(do)


@pytest.mark.parametrize("name", BY)
@given(packs, places, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_reaches_who_sees_it_and_no_one_else(name, ids, place, bad):
    """One number of q, k, v or do. Other segments, padding, and o and dq of tokens before it are as without
    it, to the bit."""
    args, (which, token, head, at) = [np.array(x) for x in drawn(4, 2)], place
    want = [np.asarray(x) for x in by(name, ids, *args)]
    args[which][token, head % args[which].shape[1], at] = bad
    got = [np.asarray(x) for x in by(name, ids, *args)]
    others, before = (ids != ids[token]) | (ids == 0), np.arange(TOKENS) < token
    if name == "the model's":  # whose padding sees padding
        others = ids != ids[token]
    for i, (x, y) in enumerate(zip(got, want)):
        np.testing.assert_array_equal(x[others], y[others])
        if i < 2:
            np.testing.assert_array_equal(x[before], y[before])
    assert ids[token] == 0 or not all(np.isfinite(x[~others]).all() for x in got)


def test_one_segment_is_causal_attention():
    @jax.jit
    def by_the_book(q, k, v):
        s = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, 2, 1)) * q.shape[-1] ** -0.5
        lse = jax.nn.logsumexp(jnp.where(np.tri(TOKENS, dtype=bool), s, -jnp.inf), -1)
        return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], lse

    args = drawn(4, 2)
    for x, y in zip(run_all(np.ones(TOKENS, np.int32), *args), by_the_book(*args[:3])):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_rows_of_a_batch_are_apart():
    args = drawn(4, 2)
    both = jax.jit(run)(np.ones((2, TOKENS), np.int32), *(np.stack([x, 2 * x]) for x in args))
    for i, scale in enumerate((1, 2)):
        for x, y in zip(both, run_all(np.ones(TOKENS, np.int32), *(scale * np.asarray(x) for x in args))):
            np.testing.assert_allclose(x[i], y, atol=2e-5)


@given(packs, st.integers(1, 10))
def test_a_window_is_the_mask_that_transformers_makes(ids, window):
    """Its `sliding_window_overlay`: key > query - window, of the same segment and not of the future."""
    key, query = np.arange(TOKENS), np.arange(TOKENS)[:, None]
    want = (ids == ids[:, None]) & (ids[:, None] > 0) & (key <= query) & (key > query - window)
    np.testing.assert_array_equal(visible_jit(ids[None], np.int32(window))[0], want)
    q, k, v, _ = drawn(4, 2)
    s = np.where(want, np.einsum("thd,shd->hts", q, np.repeat(k, 2, 1)) * 8**-0.5, -np.inf)[:, ids > 0]
    p = np.exp(s - s.max(-1, initial=-1e30, keepdims=True))
    o = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), np.repeat(v, 2, 1))
    for got in (api.attention(q, k, v, ids, window=window, backend="reference"),
                api.attention(q, k, v, api.tables_of(jnp.asarray(ids), window), backend="reference")):
        np.testing.assert_allclose(got[ids > 0], o, atol=2e-6)


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "all", jnp.zeros(2, jnp.int32), jnp.float32(3)])
def test_what_is_no_window_is_an_error(window):
    q, k, v, _ = drawn(4, 2)
    with pytest.raises(ValueError, match="window"):
        api.attention(q, k, v, np.ones(TOKENS, np.int32), window=window)


def test_a_window_beside_tables_is_an_error():
    q, k, v, _ = drawn(4, 2)
    with pytest.raises(ValueError, match="pass it to `tables_of`"):
        api.attention(q, k, v, api.tables_of(jnp.ones(TOKENS, jnp.int32)), window=3)


@given(long_packs)
def test_first_and_last_are_those_of_the_segment(ids):
    first, last = (np.asarray(x) for x in segments_jit(ids[None]))
    for segment in np.unique(ids):
        mine = np.flatnonzero(ids == segment)
        want = (mine[0], mine[-1] + 1) if segment else (len(ids), 0)
        assert ((first[mine], last[mine]) == np.array(want)[:, None]).all()


@pytest.mark.parametrize("rows", [64, 128])
@given(ids=long_packs, window=windows)
def test_walks_hold_all_that_is_seen_and_masks_are_where_they_have_to_be(rows, ids, window):
    """What is outside a walk is seen by nobody; what is said to be clear is seen by all, but for the
    diagonal."""
    window = window and np.int32(window)
    seen, (first, last) = np.asarray(visible_jit(ids[None], window)[0]), segments_jit(ids[None], window)
    causal, blocks = np.tri(len(ids), dtype=bool), list(range(len(ids) // rows))
    by_key, by_query = (np.asarray(x)[:, :4] for x in (keys_jit(first, rows), queries_jit(last, rows)))
    for walks in (by_key, by_query):
        assert sorted(walks[:, 0]) == blocks and (np.diff(walks[:, 2]) <= 0).all()
    for block, begin, steps, clear in by_key:
        mine, end = slice(block * rows, (block + 1) * rows), begin + steps * STEP
        if window:  # blocks outside the window are skipped
            assert steps * STEP < rows + window + STEP + 8
        assert not seen[mine, :begin].any() and not seen[mine, end:].any() and steps > 0 and begin % 8 == 0
        inside, real = slice(max(begin, clear), end), ids[mine] > 0
        assert (seen[mine, inside] == causal[mine, inside])[real].all()
    for block, begin, steps, clear in by_query:
        mine, end = slice(block * rows, (block + 1) * rows), begin + steps * STEP
        assert not seen[:begin, mine].any() and not seen[end:, mine].any() and begin == block * rows
        inside = slice(begin, min(clear, end))
        assert (seen[inside, mine] == causal[inside, mine]).all()


def tree_of(lengths) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and ends [768] of a row of (length, shared) sequences; each shares no more than the path
    before it."""
    members, path, left = [], 0, 768
    for own, shared in lengths:
        shared = min(shared, path - 1) if path else 0
        if own and own <= left:
            members.append((own + shared, shared))
            path, left = own + shared, left - own
    ids, ends = np.zeros(768, np.int32), np.zeros(768, np.int32)
    if members:
        ids[: 768 - left] = np.repeat(np.arange(len(members)) + 1, [n - shared for n, shared in members])
        ends[: 768 - left] = ends_of(members)
    return ids, ends


seen_in_tree = jax.jit(lambda bad, first, ends: tuple(
    jax.vmap(f, (0, None, None))(bad, first, ends) for f in (sees, seen_by)))
trees_jit = jax.jit(lambda ids, ends: api.tables_of(ids, ends=ends))


@given(st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from([0, 1, 8, 60, 130, 200])), max_size=9),
       st.integers(1, 2))
def test_walks_in_trees_leave_out_what_nobody_sees_and_mask_what_somebody_does_not(lengths, rows_of_a_batch):
    ids, ends = (x.reshape(rows_of_a_batch, -1) for x in tree_of(lengths))
    if rows_of_a_batch == 2:  # each row is a tree of its own
        ids, ends = np.stack([tree_of(lengths)[0][:384]] * 2), np.stack([np.minimum(tree_of(lengths)[1][:384],
                                                                                    384)] * 2)
    tables, n = trees_jit(ids, ends), ids.size
    flat = np.where(ends > 0, ends + ids.shape[1] * np.arange(len(ids))[:, None], 0).reshape(-1)
    at = np.arange(n)
    seen = (at <= at[:, None]) & (at[:, None] < flat)
    np.testing.assert_array_equal(tables.ends, flat)
    want = np.where(flat > 0, np.argmax(seen, 1), n)
    np.testing.assert_array_equal(tables.first, want)
    causal, skipped = at <= at[:, None], 0
    for rows, walks in tables.of_queries.items():
        walks = np.asarray(walks)
        assert sorted(walks[:, 0]) == list(range(n // rows)) and (np.diff(walks[:, 2]) <= 0).all()
        for block, begin, steps, clear, dirty, gap_at, gap in walks[:, :7]:
            mine = slice(block * rows, (block + 1) * rows)
            for size in (64, 128):
                assert gap % size == 0 and (not gap or (gap_at - begin) % size == 0)
                keys = begin + size * np.arange(-(-steps * STEP // size))
                keys = np.where(keys >= gap_at, keys + gap, keys)
                walked = np.zeros(n + size, bool)
                for key in keys:
                    assert not walked[key : key + size].any()
                    walked[key : key + size] = True
                    part = slice(key, min(key + size, n))
                    if not (key < clear and key + size > dirty):
                        real = flat[mine] > 0
                        np.testing.assert_array_equal(seen[mine, part][real], causal[mine, part][real])
                assert not seen[mine, ~walked[:n]].any() and steps > 0 and begin % 8 == 0
            skipped += gap


def test_a_late_branch_walks_over_its_prefix_and_itself():
    ids, ends = tree_of([(200, 0), (300, 100), (200, 100)])
    walks = np.asarray(trees_jit(ids[None], ends[None]).of_queries[64])
    steps = {block: (steps, gap) for block, _, steps, _, _, _, gap in walks[:, :7]}
    assert steps[10] == (7, 256), "700 keys in 11 steps, of which 4 hold other branches alone"


@given(st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([0, 1, 2, 4])), min_size=1, max_size=5))
def test_what_is_not_finite_reaches_who_sees_it_in_a_tree(lengths):
    ids, ends = (x[:TOKENS] for x in tree_of(lengths))
    ends = np.minimum(ends, TOKENS)
    tables = trees_jit(ids, ends)
    seen = np.asarray(reference.visible_from(tables.first, ids.shape, tables.ends))[0]
    bad = np.eye(TOKENS, len(tables.first), dtype=bool)
    who, whom = seen_in_tree(bad, tables.first, tables.ends)
    np.testing.assert_array_equal(who[:, :TOKENS], seen.T)
    np.testing.assert_array_equal(whom[:, :TOKENS], seen)


@pytest.mark.parametrize(("ends", "window", "message"), [
    (jnp.zeros(5, jnp.int32), None, r"ends int32\[5\]: int32 as segment_ids are, \[4\]"),
    (jnp.zeros(4), None, r"ends float32\[4\]"), (jnp.zeros(4, jnp.int32), 3, "window = 3 with ends"),
])
def test_ends_that_do_not_fit_are_errors(ends, window, message):
    with pytest.raises(ValueError, match=message):
        api.tables_of(jnp.ones(4, jnp.int32), window, ends)
