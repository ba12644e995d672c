"""Packed attention on a CPU: simulated threads, barriers and copies give the numbers; lowering for CUDA gives
the rest."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.data.trees import ends_of
from pallas_kernels.attention import api, sm90_dkv, sm90_forward
from pallas_kernels.attention.segments import tables_of
from pallas_kernels.numerics import relative_l2
from pallas_kernels.plgpu_compat import INTERPRET

pytestmark = pytest.mark.usefixtures("quick_compile")

SIMULATED = {  # name: (lengths of segments, tokens, query heads, KV heads, d, window)
    "borders in a block, a token alone, padding, two heads": ([90, 1, 60, 30], 200, 2, 1, 64, None),
    "a head alone": ([90, 1, 60, 30], 200, 1, 1, 64, None),
    "a block to the token, then two; four heads": ([128, 256], 384, 4, 1, 128, None),
    "a window, two heads": ([230, 1, 60], 300, 2, 1, 64, 70),
    "heads of 256": ([90, 1, 60, 30], 200, 2, 1, 256, None),
    "heads of 256, several walks, a window": ([300, 60], 384, 3, 1, 256, 100),
}
QUICK = "borders in a block, a token alone, padding, two heads",


def ids_of(lengths: list[int], tokens: int) -> jax.Array:
    ids = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return jnp.asarray(np.pad(ids, (0, tokens - len(ids))), jnp.int32)


def float64(lengths, q, k, v, do, dlse, scale, window=None):
    """o, lse, dq, dk, dv by the book, one segment and head after the other."""
    q, k, v, do, dlse = (np.asarray(x, np.float64) for x in (q, k, v, do, dlse))
    o, lse, grads, at = np.zeros_like(q), np.full(dlse.shape,
                                                  np.inf), [np.zeros_like(x) for x in (q, k, v)], 0
    for n in lengths:
        for h in range(q.shape[1]):
            i, j = np.s_[at : at + n, h], np.s_[at : at + n, h // (q.shape[1] // k.shape[1])]
            seen = np.tri(n, dtype=bool) & ~np.tri(n, k=-(window or n), dtype=bool)
            s = np.where(seen, q[i] @ k[j].T * scale, -np.inf)
            lse[h, at : at + n] = np.log(np.exp(s).sum(1))
            p = np.exp(s - lse[h, at : at + n, None])
            o[i] = p @ v[j]
            ds = p * (do[i] @ v[j].T - (do[i] * o[i]).sum(1)[:, None] + dlse[h, at : at + n, None]) * scale
            for grad, where, part in zip(grads, (i, j, j), (ds @ k[j], ds.T @ q[i], p.T @ do[i])):
                grad[where] += part
        at += n
    return o, lse, *grads


def operands(tokens, heads, kv_heads, d, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 5)
    drawn = [jax.random.normal(key, (tokens, h, d), dtype)
             for key, h in zip(keys, (heads, kv_heads, kv_heads, heads))]
    return *drawn, jax.random.normal(keys[4], (heads, tokens))


def vjp(f, *operands):
    """jax.vjp(f, *operands) as one program, with nothing before or behind it. If operations wait for a
    simulated kernel, it can hang: they hold the threads that its own operations need."""
    run = jax.jit(functools.partial(jax.vjp, f))
    return jax.block_until_ready(run(*jax.block_until_ready(operands)))


@jax.jit
def _pulled(pull, cotangents):
    return pull(cotangents)


def pulled(pull, cotangents):
    """pull(cotangents) as one program, likewise."""
    return jax.block_until_ready(_pulled(pull, jax.block_until_ready(cotangents)))


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
                                  for n in SIMULATED])
def test_simulated_it_equals_float64(name):
    lengths, tokens, H, K, d, window = SIMULATED[name]
    *qkv, do, dlse = operands(tokens, H, K, d)
    ids, scale = ids_of(lengths, tokens), 0.2
    want = float64(lengths, *qkv, do, dlse, scale, window)
    # padding
    *qkv, do = (x.at[sum(lengths) :].set(bad)
                for x, bad in zip((*qkv, do), (np.nan, np.inf, np.nan, -np.inf)))
    attend = functools.partial(api.attention_and_lse, window=window, scale=scale, backend="pallas",
                               interpret=INTERPRET)
    (o, lse), pull = vjp(lambda q, k, v: attend(q, k, v, ids), *qkv)
    # lse is inf at padding, and 0 times that what comes back
    got = o, lse, *pulled(pull, (do, jnp.where(ids > 0, dlse, jnp.nan)))
    real = np.asarray(ids) > 0
    np.testing.assert_allclose(lse[:, real], want[1][:, real], atol=1e-5)
    assert np.isinf(lse[:, ~real]).all()
    for what, x, y in zip(("o", "dq", "dk", "dv"), (got[0], *got[2:]), (want[0], *want[2:])):
        assert x.dtype == jnp.bfloat16 and relative_l2(x, y) < 4e-3, what
        assert not np.asarray(x, np.float32)[~real].any(), what


TREES = {  # name: ((length, shared) of sequences in order, tokens, query heads, KV heads, d)
    "a group behind its prompt": ([(100, 0), (90, 60), (95, 60), (30, 0)], 200, 2, 1, 64),
    "a gap in a walk, branches of branches": ([(260, 0), (250, 60), (245, 200), (90, 40)], 552, 2, 1, 64),
    "a gap, a head alone": ([(300, 0), (200, 60), (90, 40)], 512, 1, 1, 64),
    "a gap, heads of 256": ([(300, 0), (200, 60), (90, 40)], 512, 2, 1, 256),
}


def in_tree(members, tokens: int):
    """(segment ids, ends, bool [tokens, tokens]: whether a token sees another)."""
    ids = ids_of([length - shared for length, shared in members], tokens)
    ends = np.zeros(tokens, np.int32)
    ends[np.asarray(ids) > 0] = ends_of(members)
    at = np.arange(tokens)
    return ids, jnp.asarray(ends), (at <= at[:, None]) & (at[:, None] < ends)


@pytest.mark.slow  # test_trees_lower_for_cuda, and the walks in test_attention_reference.py
@pytest.mark.parametrize("name", TREES)
def test_simulated_trees_equal_float64(name):
    members, tokens, H, K, d = TREES[name]
    *qkv, do, dlse = operands(tokens, H, K, d)
    ids, ends, seen = in_tree(members, tokens)
    real, scale = np.asarray(ids) > 0, 0.2
    q, k, v, g, gl = (np.asarray(x, np.float64) for x in (*qkv, do, dlse))
    k, v = (np.repeat(x, H // K, 1) for x in (k, v))
    scores = np.where(seen, np.einsum("thd,shd->hts", q, k) * scale, -np.inf)
    with np.errstate(all="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
        p = np.nan_to_num(np.exp(scores - lse[..., None]))
    o = np.einsum("hts,shd->thd", p, v)
    ds = p * (np.einsum("thd,shd->hts", g, v) - (g * o).sum(-1).T[..., None] + gl[..., None]) * scale
    of_group = lambda x: x.reshape(tokens, K, H // K, d).sum(2)
    want = o, np.einsum("hts,shd->thd", ds, k), of_group(np.einsum("hts,thd->shd", ds, q)), of_group(
        np.einsum("hts,thd->shd", p, g))
    *qkv, do = (x.at[~real].set(bad) for x, bad in zip((*qkv, do), (np.nan, np.inf, np.nan, -np.inf)))
    tables = jax.jit(tables_of)(ids, ends=ends)
    attend = functools.partial(api.attention_and_lse, scale=scale, backend="pallas", interpret=INTERPRET)
    (got, found), pull = vjp(lambda q, k, v: attend(q, k, v, tables), *qkv)
    np.testing.assert_allclose(found[:, real], lse[:, real], atol=1e-5)
    for what, x, y in zip(("o", "dq", "dk", "dv"), (got, *pulled(pull, (do, jnp.where(real, dlse, jnp.nan)))),
                          want):
        assert relative_l2(x[real], y[real]) < 4e-3, what
        assert not np.asarray(x, np.float32)[~real].any(), what


@pytest.mark.slow
def test_simulated_shared_tokens_have_the_bits_of_a_plain_row():
    """The first sequence, beside branches of it or beside another sequence."""
    qkv = operands(400, 2, 1, 64)[:3]
    ids, ends, _ = in_tree([(200, 0), (150, 70), (170, 60)], 400)
    attend = functools.partial(api.attention_and_lse, backend="pallas", interpret=INTERPRET)
    runs = [jax.block_until_ready(jax.jit(attend)(*qkv, jax.jit(tables_of)(ids, ends=e)))
            for e in (None, ends)]
    np.testing.assert_array_equal(*(o[:200] for o, _ in runs))
    np.testing.assert_array_equal(*(lse[:, :200] for _, lse in runs))
    assert (np.asarray(runs[0][0][200:]) != np.asarray(runs[1][0][200:])).any()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_simulated_nothing_crosses_a_segment_and_nothing_comes_from_the_future(bad):
    """Of the third segment something of each operand is not finite. As without it, to the bit, are the others
    and padding, and what tokens before it have of keys that they see."""
    *clean, _ = operands(200, 2, 1, 64)
    ids, at = ids_of([90, 1, 60, 30], 200), (130, 128, 126, 140)
    spoiled = [x.at[i, 0, 3].set(bad) for x, i in zip(clean, at)]

    def run(*qkv_do):
        f = functools.partial(api.attention_and_lse, segments=ids, backend="pallas", interpret=INTERPRET)
        (o, lse), pull = vjp(f, *qkv_do[:3])
        gradients = pulled(pull, (qkv_do[3], jnp.zeros_like(lse)))
        return [np.asarray(x, np.float32) for x in (o, lse.T, *gradients)]

    others, before = np.asarray(ids) != 3, np.arange(200) < min(at)
    for what, got, want in zip(("o", "lse", "dq", "dk", "dv"), run(*spoiled), run(*clean)):
        np.testing.assert_array_equal(got[others], want[others], err_msg=what)
        if what in ("o", "lse", "dq"):
            np.testing.assert_array_equal(got[before], want[before], err_msg=what)
        assert not np.isfinite(got[~others]).all()


@pytest.mark.slow
def test_in_fp8_it_rounds_exponentials_as_the_reference_does():
    """One step of keys, so that its maximum is the row's."""
    qkv = [x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16) for x in operands(96, 2, 1, 64)[:3]]
    attend = functools.partial(api.attention, *qkv, ids_of([60, 30], 96))
    got, want, plain = attend(fp8=True, backend="pallas", interpret=INTERPRET), attend(fp8=True), attend()
    assert relative_l2(got, want) < 2.5e-3 and relative_l2(plain, want) > 5e-3


def shapes(lead=(4096,), d=128, dtype=jnp.bfloat16, H=32, K=8):
    struct = jax.ShapeDtypeStruct
    kv = struct((*lead, K, d), dtype)
    return struct((*lead, H, d), dtype), kv, kv, struct(lead, jnp.int32)


def traced(args, **options) -> jax.stages.Traced:
    """The forward and the backward."""

    def f(q, k, v, ids):
        o, pull = jax.vjp(lambda *qkv: api.attention(*qkv, ids, backend="pallas", **options), q, k, v)
        return o, pull(o)

    return jax.jit(f).trace(*args)


def lower(args, **options) -> str:
    return traced(args, **options).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow  # `make preset-memory` compiles it within an update
@pytest.mark.parametrize(("d", "dtype"), [(64, jnp.bfloat16), (128, jnp.float16), (256, jnp.bfloat16)])
def test_it_lowers_for_cuda(d, dtype):
    text = lower(shapes(d=d, dtype=dtype))
    assert text.count("mosaic_gpu_v2") == 3 and "4096x4096" not in text


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 6])
def test_every_group_lowers_for_cuda(group):
    assert "mosaic_gpu" in lower(shapes(H=group, K=1))


@pytest.mark.slow  # test_shared_prefix.py trains in trees by the reference
def test_a_forward_in_trees_lowers_for_cuda():
    *qkv, ids = shapes((256,), d=64, H=2, K=1)
    attend = lambda q, k, v, ids, ends: api.attention(q, k, v, tables_of(ids, ends=ends), backend="pallas")
    text = jax.jit(attend).trace(*qkv, ids, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.slow
@pytest.mark.parametrize("group", [4, 1])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_trees_lower_for_cuda(d, group):
    def gradients(q, k, v, ids, ends):
        attend = lambda *qkv: api.attention(*qkv, tables_of(ids, ends=ends),
                                            backend="pallas").astype(jnp.float32).sum()
        return jax.grad(attend, (0, 1, 2))(q, k, v)

    *qkv, ids = shapes(d=d, H=8, K=8 // group)
    text = jax.jit(gradients).trace(*qkv, ids, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 3 and "4096x4096" not in text


@pytest.mark.slow
def test_rows_of_odd_lengths_lower_for_cuda():
    assert "mosaic_gpu" in lower(shapes((3, 50), H=4, K=1))


def test_whole_chunks_are_not_padded():
    padded = lambda tokens: [line for line in str(traced(shapes((2, tokens), H=2, K=1)).jaxpr).splitlines()
                             if ":bf16" in line and " = pad[" in line]
    assert padded(255) and not padded(256)


def bad(name: str):
    q, k, v, ids = shapes((2, 256))
    like = lambda s, shape=None, dtype=None: jax.ShapeDtypeStruct(shape or s.shape, dtype or s.dtype)
    return {
        "rows": ((like(q, (256, 32, 128)), k, v, ids),
         r"q bfloat16\[256, 32, 128\], k.*\[B, T, ...\] in front"),
        "lengths": ((q, like(k, (2, 128, 8, 128)), like(v, (2, 128, 8, 128)), ids),
                    r"k bfloat16\[2, 128, 8, 128\]"),
        "values": ((q, k, like(v, (2, 256, 4, 128)), ids),
                   r"v bfloat16\[2, 256, 4, 128\].*k and v \[T, K, d\]"),
        "heads": ((q, like(k, (2, 256, 5, 128)), like(v, (2, 256, 5, 128)), ids), "K divides H"),
        "empty": ((like(q, (2, 0, 32, 128)), *[like(x, (2, 0, 8, 128)) for x in (k, v)], like(ids, (2, 0))),
                  r"q bfloat16\[2, 0"),
        "types": ((q, like(k, dtype=jnp.float16), v, ids), "of one floating-point type"),
        "ids": ((q, k, v, like(ids, (2, 128))), r"segment_ids int32\[2, 128\].*one a token"),
        "ids' type": ((q, k, v, like(ids, dtype=jnp.float32)), r"segment_ids float32.*is int32"),
    }[name]


@pytest.mark.parametrize("backend", ["pallas", "reference"])
@pytest.mark.parametrize("name", ["rows", "lengths", "values", "heads", "empty", "types", "ids", "ids' type"])
def test_bad_operands_are_errors_at_trace_time(name, backend):
    args, message = bad(name)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(api.attention, backend=backend), *args)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 2, 1], "1 comes back at token 3 of row 0; a segment's tokens are contiguous"),
        ([1, 0, 1, 1], "1 comes back at token 2 of row 0"),
        ([1, 1, -1, 0], "token 2 of row 0 has -1; ids are above 0, and 0 is padding"),
    ],
)
def test_ids_that_are_known_are_checked(ids, message):
    q, k, v, _ = (jnp.zeros(s.shape, s.dtype) for s in shapes((4,), H=1, K=1))
    with pytest.raises(ValueError, match=message):
        api.attention(q, k, v, jnp.asarray(ids, jnp.int32))


def test_what_the_kernels_do_not_take_is_an_error():
    for args, message in (
        (shapes(dtype=jnp.float32),
         'q is float32: the kernels take bfloat16 or float16; backend="reference" takes any'),
        (shapes(d=96), 'heads of 96: the kernels have 64, 128 and 256; backend="reference" takes any'),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(api.attention, backend="pallas"), *args)
        jax.eval_shape(functools.partial(api.attention, backend="reference"), *args)
    for scale in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a finite number above 0"):
            jax.eval_shape(functools.partial(api.attention, scale=scale), *shapes())
    with pytest.raises(ValueError, match="shared memory"):
        lower(shapes(), tiles=api.Tiles(sm90_forward.TILES[128]._replace(k_stages=5)))
    with pytest.raises(ValueError, match="shared memory"):
        jax.jit(of_keys).trace(*shapes()).lower(lowering_platforms=("cuda",))


def of_keys(q, k, v, ids):
    """The gradients of keys and values alone, with tiles that are too large."""
    sums = jnp.zeros((q.shape[1], len(q)), jnp.float32)
    tiles = sm90_dkv.Tiles(q_stages=9)
    return sm90_dkv.gradients(q, k, v, q, sums, sums, tables_of(ids), scale=1.0, tiles=tiles)


@pytest.mark.slow  # test_what_the_kernels_do_not_take_is_an_error lowers the last of the three kernels alone
def test_the_tiles_of_the_backward_reach_it():
    with pytest.raises(ValueError, match="shared memory"):
        lower(shapes(), tiles=api.Tiles(dkv=sm90_dkv.Tiles(q_stages=9)))
