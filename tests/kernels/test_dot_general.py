"""fp8_dot_general against float64, within what FP8's rounding allows; where it is used; what its program
holds."""

from __future__ import annotations

import functools
import itertools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from benchmarks.processes import on_devices
from pallas_kernels import blockwise_matmul, fp8_dot_general, fp8_linear, quantize_blocks, quantize_rows
from pallas_kernels.dot_general import api
from pallas_kernels.numerics import relative_l2, worst_tile
from pallas_kernels.testing import assert_blockwise_close, assert_same_bits, seeds, shapes, tile_distinct

pytestmark = pytest.mark.usefixtures("quick_compile")

DTYPES = jnp.bfloat16, jnp.float16, jnp.float32
NK, KN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
reference = functools.partial(fp8_dot_general, backend="reference")
linear = functools.partial(fp8_linear, backend="reference")
float64 = lambda *arrays: [np.asarray(a).astype(np.float64) for a in arrays]


def rounding(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """The most by which a code over its scale misses each number of x [M, N]: half a step of E4M3, which has
    four bits, or half of its subnormal step; 448 is the largest code of a block, and a quotient in float32
    moves all by 2^-22."""
    amax = np.zeros(x.shape)
    for i, j in itertools.product(range(0, x.shape[0], block[0]), range(0, x.shape[1], block[1])):
        amax[i : i + block[0], j : j + block[1]] = max(
            np.abs(x[i : i + block[0], j : j + block[1]]).max(), 1e-10
        )
    return np.maximum(np.abs(x) * 2.0**-4, amax / 448 * 2.0**-10) * (1 + 2.0**-20)


def assert_within_rounding(got, a, a_error, b, b_error) -> None:
    """got is a b^T to the operands' rounding, that of float32 sums, and that of the result."""
    want, size = a @ b.T, np.abs(a) @ np.abs(b).T
    limit = np.abs(a) @ b_error.T + a_error @ np.abs(b).T + a_error @ b_error.T + 2.0**-20 * size
    info = jnp.finfo(got.dtype)
    (got,) = float64(got)
    limit += 2.0 ** -(info.nmant + 1) * (np.abs(want) + limit) + float(info.smallest_subnormal)
    assert (np.abs(got - want) <= limit).all(), (np.abs(got - want) / limit).max()


def products(x, w, dy, axes, **options):
    y, pull = jax.vjp(lambda x, w: reference(x, w, axes, **options), x, w)
    return y, *pull(dy.astype(y.dtype))


run = jax.jit(products, static_argnames=("axes", "preferred_element_type"))


@pytest.mark.parametrize("turned", [False, True])
@given(shape=shapes(3, (1, 7, 100, 128, 130, 300)), seed=seeds(), dtype=st.sampled_from(DTYPES))
def test_all_three_products_are_within_the_rounding_of_their_blocks(turned, shape, seed, dtype):
    """Each element of the result, d lhs and d kernel, of numbers whose blocks are at magnitudes of their
    own."""
    (t, n, k), seed = shape, seed % 1000
    x, w, dy = (
        tile_distinct(s, dtype, seed + i, block)
        for i, (s, block) in enumerate((((t, k), (1, 128)), ((n, k), (128, 128)), ((t, n), (1, 128))))
    )
    x, dy = (
        (x * np.asarray(2.0**-6, dtype), dy * np.asarray(2.0**-6, dtype)) if dtype == jnp.float16 else (x, dy)
    )
    y, dx, dw = run(x, w.T if turned else w, dy, KN if turned else NK, preferred_element_type=jnp.float32)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, dtype, dtype)
    x, w, dy = float64(x, w, dy)
    w_error = rounding(w, (128, 128))
    assert_within_rounding(y, x, rounding(x, (1, 128)), w, w_error)
    if dtype != jnp.float16:  # whose range gradients leave
        assert_within_rounding(dx, dy, rounding(dy, (1, 128)), w.T, w_error.T)
        dw = dw.T if turned else dw
        assert_within_rounding(dw, dy.T, rounding(dy.T, (1, 128)), x.T, rounding(x.T, (1, 128)))


@st.composite
def any_axes(draw):
    """Shapes of both operands, dimension numbers and the same as an einsum: axes of every kind, none or two,
    in any order."""
    counts = [draw(st.integers(0, most)) for most in (2, 2, 2)] + [draw(st.integers(1, 2))]
    letters = iter("abcdefgh")
    batch, tokens, columns, contracted = ([next(letters) for _ in range(count)] for count in counts)
    sides = {letter: draw(st.sampled_from((1, 2, 3, 5))) for letter in batch + tokens + columns}
    sides |= {letter: draw(st.sampled_from((1, 3, 20))) for letter in contracted}
    lhs, rhs = (draw(st.permutations(batch + free + contracted)) for free in (tokens, columns))
    batch, contracted = draw(st.permutations(batch)), draw(st.permutations(contracted))
    at = lambda letters, of: tuple(of.index(letter) for letter in letters)
    axes = ((at(contracted, lhs), at(contracted, rhs)), (at(batch, lhs), at(batch, rhs)))
    free = [letter for operand in (lhs, rhs) for letter in operand if letter not in batch + contracted]
    equation = f"{''.join(lhs)},{''.join(rhs)}->{''.join(batch + free)}"
    return *(tuple(sides[letter] for letter in operand) for operand in (lhs, rhs)), axes, equation


@settings(max_examples=5)
@given(any_axes(), seeds())
def test_any_axes_are_those_of_lax(case, seed):
    """The result and both gradients, against an einsum in float64. Each number is its operands', off by 2^-4
    at the most."""
    lhs, rhs, axes, equation = case
    rng = np.random.default_rng(seed)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (lhs, rhs))
    like = lax.dot_general(x, w, axes)
    dy = rng.normal(size=like.shape).astype(np.float32)
    y, dx, dw = products(jnp.asarray(x), jnp.asarray(w), jnp.asarray(dy), axes)
    assert (y.shape, y.dtype) == (like.shape, like.dtype)
    (a, b), c = equation.split("->")[0].split(","), equation.split("->")[1]
    for got, eq, operands in (
        (y, equation, (x, w)),
        (dx, f"{c},{b}->{a}", (dy, w)),
        (dw, f"{a},{c}->{b}", (x, dy)),
    ):
        p, q = float64(*operands)
        off = [2.0**-4 * np.abs(z) + np.abs(z).max() * 2.0**-18 for z in (p, q)]
        limit = np.einsum(eq, np.abs(p) + off[0], np.abs(q) + off[1]) - np.einsum(eq, np.abs(p), np.abs(q))
        assert (np.abs(float64(got)[0] - np.einsum(eq, p, q)) <= limit + 1e-6).all()


def test_the_backward_takes_the_very_codes_of_the_forward():
    """To the last bit: the kernel is quantised once, its codes are turned for d lhs; the result is the raw
    product."""
    x, w, dy = (tile_distinct(s, jnp.bfloat16, i) for i, s in enumerate(((64, 300), (200, 300), (64, 200))))
    y, dx, dw = run(x, w, dy, NK)
    codes, scale = quantize_blocks(w)
    assert_same_bits(y, blockwise_matmul(*quantize_rows(x), codes, scale))
    assert_same_bits(dx, blockwise_matmul(*quantize_rows(dy), codes.T, scale.T))
    turned = run(x, w.T, dy, KN)
    assert_same_bits((y, dx, dw), (*turned[:2], turned[2].T))
    assert_same_bits(linear(x[None], w)[0], y)


# --- against bfloat16 ---


@functools.cache
def layer():
    """A layer's input with some wide channels, its weights, and what a cross-entropy makes of its outputs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 512)) * np.where(rng.random(512) < 0.02, 12, 1)
    w = rng.normal(size=(512, 384)) / np.sqrt(512)
    return *(jnp.asarray(a, jnp.bfloat16) for a in (x, w)), rng.integers(0, 384, 256)


def loss(product, x, w, targets):
    logits = product(x, w, KN).astype(x.dtype if x.dtype == jnp.float64 else jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1))


def test_gradients_are_within_6_percent_of_bfloat16s_and_lose_nothing():
    x, w, targets = layer()
    got = jax.jit(jax.grad(functools.partial(loss, reference), (0, 1)))(x, w, targets)
    want = jax.jit(jax.grad(functools.partial(loss, lax.dot_general), (0, 1)))(x, w, targets)
    for a, b in zip(got, want):
        assert worst_tile(a, b, (128, 128)) < 0.06
    with jax.enable_x64(True):
        wide = (jnp.asarray(a, jnp.float64) for a in (x, w))
        exact = jax.grad(functools.partial(loss, lax.dot_general), (0, 1))(*wide, targets)
    for a, b in zip(got, exact):
        (a, b), tiles = float64(a, np.abs(b)), np.ones((128, 128))
        largest = b.reshape(b.shape[0] // 128, 128, -1, 128).max((1, 3))
        assert (a[b > np.kron(largest, tiles) * 2.0**-9] != 0).all()


def test_gradients_of_a_mean_are_not_lost():
    """The raw products' would be: a code's cotangent is rounded to E4M3, in which what is under 2^-10 is
    0."""
    x, w, _ = layer()
    for f in (
        lambda w: jnp.mean(reference(x, w, KN).astype(jnp.float32)),
        lambda w: 1e6 * jnp.mean(reference(x, w, KN)),
    ):
        assert jnp.isfinite(jax.grad(f)(w)).all() and (jax.grad(f)(w) != 0).mean() > 0.99


# --- in models and under transformations ---


def test_nnx_linear_and_linear_general():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 3, 40)), jnp.float32)
    kinds = {
        "Linear": lambda **how: nnx.Linear(40, 24, rngs=nnx.Rngs(0), **how),
        "LinearGeneral": lambda **how: nnx.LinearGeneral(
            (3, 40), (2, 5), axis=(-2, -1), rngs=nnx.Rngs(0), **how
        ),
    }
    for make in kinds.values():
        ours, theirs = make(dot_general=reference), make()
        of = lambda model: nnx.value_and_grad(lambda m, x: jnp.mean(jnp.square(m(x))))(model, x)
        (a, grads), (b, wanted) = of(ours), of(theirs)
        assert abs(a - b) < 0.05 * b and relative_l2(ours(x), theirs(x)) < 0.06
        for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
            assert relative_l2(got, want) < 0.08


class AsALayer(nn.Module):
    """For a hook that makes a layer of what it is given, as MaxText's newer versions do."""

    @nn.compact
    def __call__(self, *args, **options):
        return reference(*args, **options)


HOOKS = {"dot_general": reference}, {"dot_general_cls": lambda: reference}, {"dot_general_cls": AsALayer}


@pytest.mark.parametrize("how", HOOKS)
@pytest.mark.parametrize("dense", [nn.Dense, functools.partial(nn.DenseGeneral, axis=-1)])
def test_linen_dense(dense, how):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 40)), jnp.bfloat16)
    model = dense(24, dtype=jnp.bfloat16, **how)
    variables = model.init(jax.random.key(0), x)
    y = model.apply(variables, x)
    kernel = variables["params"]["kernel"].astype(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert_same_bits(y, reference(x, kernel, (((2,), (0,)), ((), ()))))
    grads = jax.grad(lambda v: jnp.mean(model.apply(v, x).astype(jnp.float32) ** 2))(variables)
    assert all((g != 0).any() for g in jax.tree.leaves(grads))


X, W = (
    jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.float32)
    for i, s in enumerate(((3, 8, 40), (40, 40)))
)
square = lambda x, w: jnp.sum(jnp.square(linear(x, w)))
of_both = lambda f: jax.jit(jax.grad(f, (0, 1)))


def test_vmap_is_one_after_another():
    each = [of_both(square)(x, W) for x in X]
    dx, dw = (jnp.stack(g) for g in zip(*each))
    assert_same_bits(jax.jit(jax.vmap(jax.grad(square, (0, 1)), (0, None)))(X, W), (dx, dw))
    assert_same_bits(jax.jit(jax.vmap(linear, (0, None)))(X, W), jnp.stack([linear(x, W) for x in X]))
    by_both = of_both(lambda x, w: jax.vmap(square, (0, None))(x, w).sum())(X, W)
    assert_blockwise_close(by_both[1], dw.sum(0), rtol=1e-6)
    ws = jnp.stack([W, 2 * W, 3 * W])
    batched = reference(X, ws, (((2,), (2,)), ((0,), (0,))))
    assert_same_bits(jax.vmap(linear)(X, ws), batched)


def test_scan_and_remat_change_no_bit():
    def deep(layer):
        return lambda x, w: jnp.sum(lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0] ** 2)

    layer = lambda x, w: jnp.tanh(linear(x, w))
    want = of_both(lambda x, w: jnp.sum(layer(layer(layer(x, w), w), w) ** 2))(X[0], W)
    for f in (deep(layer), deep(jax.checkpoint(layer)), jax.checkpoint(deep(layer))):
        for a, b in zip(of_both(f)(X[0], W), want):
            assert_blockwise_close(a, b, rtol=1e-6)


SHARDED = """
import functools, jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from pallas_kernels import fp8_linear
from pallas_kernels.testing import assert_blockwise_close, assert_same_bits

rng, mesh = np.random.default_rng(0), jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((512, 256), (128, 256)))
linear = functools.partial(fp8_linear, backend="reference")
split = jax.shard_map(linear, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
both = lambda f: jax.jit(jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1)))(x, w)[1]
(dx, dw), (want_dx, want_dw) = both(split), both(linear)
assert_same_bits((split(x, w), dx), (linear(x, w), want_dx))
assert_blockwise_close(dw, want_dw, rtol=1e-5)
"""


def test_in_a_shard_map_over_tokens_it_is_the_same():
    """The kernel's gradient is the sum over devices; 128 tokens each, so that blocks along the tokens are the
    same."""
    on_devices(4, SHARDED)


def test_a_second_derivative_is_an_error_that_says_so():
    said = "fp8_dot_general has a first derivative, by reverse mode, and no other"
    for f in (lambda x: jnp.sum(jax.grad(square)(x, W)), lambda x: jnp.sum(jax.jit(jax.grad(square))(x, W))):
        with pytest.raises(TypeError, match=said):
            jax.grad(f)(X[0])
    with pytest.raises(TypeError, match="custom_vjp|has a first derivative"):
        jax.jvp(lambda x: linear(x, W), (X[0],), (X[0],))


# --- what is not finite, what is refused, what is said ---


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_its_blocks_and_nothing_else(bad):
    x, w, dy = (tile_distinct(s, np.float32, i) for i, s in enumerate(((40, 300), (300, 300), (40, 300))))
    want = run(x, w, dy, NK)
    dirty = x.copy()
    dirty[3, 200] = bad
    y, dx, dw = run(dirty, w, dy, NK)
    assert np.isnan(y[3]).all() and np.isnan(dw[:, 200]).all()
    others = lambda a, at, axis: np.delete(np.asarray(a), at, axis)
    assert_same_bits(
        (others(y, 3, 0), dx, others(dw, 200, 1)), (others(want[0], 3, 0), want[1], others(want[2], 200, 1))
    )
    dirty = w.copy()
    dirty[130, 5] = bad
    y, dx, dw = run(x, dirty, dy, NK)
    assert np.isnan(y[:, 128:256]).all() and np.isnan(dx[:, :128]).all()
    kept = others(y, np.s_[128:256], 1), others(dx, np.s_[:128], 1), dw
    assert_same_bits(kept, (others(want[0], np.s_[128:256], 1), others(want[1], np.s_[:128], 1), want[2]))


def test_dtypes_are_those_of_lax():
    for a, b in itertools.product(DTYPES, DTYPES):
        x, w = X[0].astype(a), W.astype(b)
        for wanted in (None, *DTYPES):
            ours = jax.eval_shape(
                functools.partial(reference, dimension_numbers=NK, preferred_element_type=wanted), x, w
            )
            theirs = functools.partial(lax.dot_general, dimension_numbers=NK, preferred_element_type=wanted)
            assert ours == jax.eval_shape(theirs, x, w)
        dx, dw = jax.eval_shape(jax.grad(lambda x, w: jnp.sum(reference(x, w, NK)), (0, 1)), x, w)
        assert (dx.dtype, dw.dtype) == (a, b)


def test_what_is_refused_says_what_was_found_and_what_to_do():
    x, w = X[0], W
    for args, options, said in (
        ((x.astype(jnp.int8), w), {}, r"lhs is int8\[8, 40\].*cast it, or use jax.lax.dot_general"),
        ((x, w.astype(jnp.complex64)), {}, r"rhs is complex64\[40, 40\]"),
        ((x.astype(jnp.float8_e4m3fn), w), {}, "codes already; pallas_kernels.blockwise_matmul"),
        ((x, w.astype(jnp.float8_e5m2)), {}, "rhs is float8_e5m2.*codes already"),
        ((x[:0], w), {}, r"lhs is float32\[0, 40\], empty"),
        ((x, w[:0]), {}, r"rhs is float32\[0, 40\], empty"),
        ((x, w), {"precision": lax.Precision.HIGHEST}, "the products are FP8"),
        ((x, w), {"precision": ("default", "highest")}, "the products are FP8"),
        ((x, w), {"preferred_element_type": jnp.int32}, "preferred_element_type = int32"),
        ((x, w), {"out_sharding": jax.sharding.PartitionSpec()}, "inside a shard_map"),
        ((x, w), {"backend": "cuda"}, 'one of "auto", "pallas", "reference"'),
    ):
        with pytest.raises(ValueError, match=said):
            fp8_dot_general(*args, NK, **options)
    with pytest.raises(TypeError, match="contracting dimensions"):
        reference(x, w[:, :30], NK)
    with pytest.raises(ValueError,
                       match=r"x \[3, 8, 40\], w \[3, 8, 40\]: expected x \[..., K\] and w \[N, K\]"):
        fp8_linear(X, X)


def test_the_reference_is_never_taken_silently():
    api._warn_once.cache_clear()
    with pytest.warns(
        RuntimeWarning, match='on the backend "cpu", which has no Hopper GPU: the reference computes'
    ):
        fp8_linear(X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8_linear(X, W)  # once
        linear(X, W)
