"""Grouped products on a CPU: where rows lie, the reference, the simulated kernels, their lowering for CUDA,
bad input."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.blockwise_matmul.tiles import Tiles
from pallas_kernels.grouped_matmul import api, high, sm90
from pallas_kernels.numerics import tile_distinct, worst_tile
from pallas_kernels.plgpu_compat import INTERPRET
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")

UNEVEN, HUGE = [130, 0, 5], [0, 150, 0]
ROWS, N, K = 150, 192, 256
# name: (group sizes, wgrad, tiles): every walk, empty groups, rows of no group, more than one tile a block
SIMULATED = {
    "uneven": (UNEVEN, False, Tiles(buffers=2)),
    "wgrad, uneven": (UNEVEN, True, Tiles(2)),
    "wgrad, one huge": (HUGE, True, Tiles(width=96)),
}


@functools.cache
def plan(sizes: tuple[int, ...], rows: int) -> api.Groups:
    return api.plan_groups(jnp.asarray(sizes, jnp.int32), rows)


def operands(sizes: list[int], wgrad: bool) -> tuple:
    """Quantised tile-distinct numbers in the padded layout, and the product of what the codes stand for in
    float64."""
    groups, experts = plan(tuple(sizes), ROWS), len(sizes)
    block = (128, 1) if wgrad else (1, 128)
    x = api.pad_rows(jnp.asarray(tile_distinct((ROWS, K), block)), groups)
    if wgrad:
        dy = api.pad_rows(jnp.asarray(tile_distinct((ROWS, N), block, seed=1)), groups)
        args = *q.quantize_tokens(dy), *q.quantize_tokens(x), groups
        a, b = (np.asarray(q.dequantize_rows(*pair), np.float64) for pair in (args[:2], args[2:4]))
        own = [np.repeat(np.asarray(groups.expert) == e, 128) for e in range(experts)]
        return args, np.stack([a[:, rows] @ b[:, rows].T for rows in own])
    w = jnp.asarray(tile_distinct((experts * 256, K), (128, 128), seed=1)).reshape(experts, 256, K)[:, :N]
    args = *q.quantize_rows(x), *q.quantize_blocks(w), groups
    a, b = np.asarray(q.dequantize_rows(*args[:2]),
                      np.float64), np.asarray(q.dequantize_blocks(*args[2:4]), np.float64)
    expert = np.repeat(np.asarray(groups.expert), 128)
    return args, np.stack([row @ b[e].T if e < experts else np.zeros(N) for row, e in zip(a, expert)])


def product(wgrad: bool):
    return api.grouped_wgrad if wgrad else api.grouped_matmul


def worst(got, want) -> float:
    return worst_tile(np.asarray(got).reshape(-1, want.shape[-1]), want.reshape(-1, want.shape[-1]), (16, 16))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "wgrad, uneven" in n else n
                                  for n in SIMULATED])
def test_simulated_kernel_and_reference_equal_float64(name):
    sizes, wgrad, tiles = SIMULATED[name]
    args, want = operands(sizes, wgrad)
    reference = product(wgrad)(*args, out_dtype=jnp.float32)
    got = product(wgrad)(*args, out_dtype=jnp.float32, backend="pallas", tiles=tiles, interpret=INTERPRET)
    assert got.shape == want.shape and got.dtype == jnp.float32
    assert worst(reference, want) < 1e-5 and worst(got, want) < 1e-5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=5, max_size=5), st.sampled_from([1, 300, 900]))
def test_every_row_lies_in_a_block_of_its_expert(sizes, rows):
    """Fewer rows than sizes say: the last are cut. More: they are of no expert."""
    groups = jax.tree.map(np.asarray, jax.jit(api.plan_groups, static_argnums=1)(jnp.asarray(sizes), rows))
    assert groups.source.shape == (api.padded_rows(rows, len(sizes)),) and (groups.starts % 128 == 0).all()
    expert = np.append(np.repeat(np.arange(len(sizes)), sizes), np.full(rows, len(sizes)))[:rows]
    np.testing.assert_array_equal(groups.sizes, np.bincount(expert, minlength=len(sizes) + 1)[: len(sizes)])
    of_row = np.append(np.repeat(groups.expert, 128), len(sizes))[groups.padded]
    np.testing.assert_array_equal(of_row, expert)
    mine = expert < len(sizes)
    np.testing.assert_array_equal(groups.source[groups.padded[mine]], np.arange(rows)[mine])
    assert (groups.source == rows).sum() == groups.source.size - mine.sum()


def test_padding_and_back_is_the_identity_with_its_gradient():
    groups = plan(tuple(UNEVEN), ROWS)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 8)), jnp.float32)
    back = lambda x: api.unpad_rows(api.pad_rows(x, groups), groups)
    own = jnp.arange(ROWS)[:, None] < sum(UNEVEN)
    np.testing.assert_array_equal(back(x), jnp.where(own, x, 0))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(back(x) * x) / 2)(x), jnp.where(own, x, 0))


def shapes(wgrad: bool, experts: int = 128, rows: int = 131072, n: int = 1536, k: int = 2048) -> list:
    struct = jax.ShapeDtypeStruct
    groups = jax.eval_shape(functools.partial(api.plan_groups, rows=rows), struct((experts,), jnp.int32))
    p = groups.source.shape[0]
    if wgrad:
        first = struct((n, p), q.E4M3), struct((n, p // 128), jnp.float32)
        return [*first, struct((k, p), q.E4M3), struct((k, p // 128), jnp.float32), groups]
    first = struct((p, k), q.E4M3), struct((p, k // 128), jnp.float32)
    return [*first, struct((experts, n, k), q.E4M3), struct((experts, -(-n // 128), k // 128), jnp.float32),
            groups]


def lower(args, wgrad: bool, **options) -> str:
    f = functools.partial(product(wgrad), backend="pallas", **options)
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


VARIANTS = [(False, name) for name in sm90.FORWARD] + [(True, name) for name in sm90.WEIGHTS]
SOME = VARIANTS[0], VARIANTS[-1]


@pytest.mark.parametrize(("wgrad", "name"),
                         [v if v in SOME else pytest.param(*v, marks=pytest.mark.slow) for v in VARIANTS])
def test_every_candidate_lowers_for_cuda(wgrad, name):
    tiles = (sm90.WEIGHTS if wgrad else sm90.FORWARD)[name]
    assert "mosaic_gpu" in lower(shapes(wgrad), wgrad, tiles=tiles)


@pytest.mark.parametrize(("wgrad", "out_dtype"), [(False, jnp.float32), (True, jnp.bfloat16)])
def test_other_results_and_gradients_in_e5m2_lower_for_cuda(wgrad, out_dtype):
    args = shapes(wgrad, experts=5, rows=7, n=192, k=384 if not wgrad else 128)
    args[0] = jax.ShapeDtypeStruct(args[0].shape, q.E5M2)
    assert "mosaic_gpu" in lower(args, wgrad, out_dtype=out_dtype)


def bad(name: str):
    struct = jax.ShapeDtypeStruct
    x, xs, w, ws, groups = shapes(False, experts=4, rows=1000, n=384, k=512)
    return {
        "rows": ((struct((1000, 512), q.E4M3), xs, w, ws, groups),
         r"1000 rows along axis 0.*4 experts are padded to 1408"),
        "experts": ((x, xs, struct((8, 384, 512), q.E4M3), ws, groups),
                    r"w_codes \[8, 384, 512\] has 8 experts, groups have 4"),
        "contraction": ((x, xs, struct((4, 384, 640), q.E4M3), ws, groups),
                        r"x \(1408, 512\) and w \(4, 384, 640\) contract"),
        "codes": ((struct(x.shape, jnp.bfloat16), xs, w, ws, groups),
                  r"x_codes is bfloat16\[1408, 512\]: expected float8_e4m3fn"),
        "axes": ((x, xs, struct((384, 512), q.E4M3), ws, groups),
                 r"w_codes is float8_e4m3fn\[384, 512\].*3 axes"),
        "row scales": ((x, struct((4, 1408), jnp.float32), w, ws, groups),
                       r"x_scale is float32\[4, 1408\].*float32\[1408, 4\]"),
        "block scales": ((x, xs, w, struct((4, 3, 5), jnp.float32), groups),
                         r"w_scale is float32\[4, 3, 5\].*\[4, 3, 4\]"),
        "scale type": ((x, struct(xs.shape, jnp.bfloat16), w, ws, groups), r"x_scale is bfloat16\[1408, 4\]"),
        "width": ((x, xs, struct((4, 400, 512), q.E4M3), struct((4, 4, 4), jnp.float32), groups),
                  "N = 400: must be a multiple of 64"),
        "one box": ((x, xs, struct((4, 64, 512), q.E4M3), struct((4, 1, 4), jnp.float32), groups),
                    "N = 64: must be at least 128"),
    }[name]


BAD = ["rows", "experts", "contraction", "codes", "axes", "row scales", "block scales", "scale type", "width",
       "one box"]


@pytest.mark.parametrize("backend", ["pallas", "reference"])
@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_errors_at_trace_time(name, backend):
    args, message = bad(name)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(api.grouped_matmul, backend=backend), *args)


def test_bad_gradients_sizes_results_and_tiles_are_errors():
    dy, dys, x, xs, groups = shapes(True, experts=4, rows=1000, n=384, k=512)
    struct = jax.ShapeDtypeStruct
    for args, message in {
        (struct((1408, 384), q.E4M3), dys, x, xs): r"dy_codes \[1408, 384\] has 384 rows along axis 1",
        (dy, dys, struct((500, 1408), q.E4M3), xs): "K = 500: must be a multiple of 32",
        (dy, struct((11, 384), jnp.float32), x, xs): r"dy_scale is float32\[11, 384\].*float32\[384, 11\]",
    }.items():
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(api.grouped_wgrad, *args, groups)
    four = jnp.ones(4, int)
    for sizes, rows, message in ((four * 1.0, 8, r"float32\[4\]"), (four.reshape(2, 2), 8, r"\[2, 2\]"),
                                 (four, 0, "rows = 0")):
        with pytest.raises(ValueError, match=message):
            api.plan_groups(sizes, rows)
    args = shapes(False, experts=4, rows=1000, n=384, k=512)
    with pytest.raises(ValueError, match="a result of float16"):
        jax.eval_shape(functools.partial(api.grouped_matmul, out_dtype=jnp.float16), *args)
    for tiles, message in {
        Tiles(cluster="n"): "in dense products",
        Tiles(2, high=2): "so high must be 1",
        Tiles(2, flight=2): "so flight must be 1",
        Tiles(2, unroll=2): "so unroll must be 1",
    }.items():
        with pytest.raises(ValueError, match=message):
            lower(args, False, tiles=tiles)


def test_products_in_high_precision_are_of_their_operands_type_and_by_name_the_kernels_or_an_error():
    groups, struct = shapes(False, experts=4, rows=1000)[-1], jax.ShapeDtypeStruct

    def traced(n: int, dtype=jnp.bfloat16, **backend):
        x, dy, w = (struct(shape, dtype) for shape in ((1408, 256), (1408, n), (4, n, 256)))
        y = lambda: jax.eval_shape(functools.partial(high.grouped_matmul, **backend), x, w, groups)
        return y, lambda: jax.eval_shape(functools.partial(high.grouped_wgrad, **backend), dy, x, groups)

    for f in traced(192):
        assert f().dtype == jnp.bfloat16
    for args in ((192,), (256, jnp.float32)):
        for f in traced(*args, backend="pallas"):
            with pytest.raises(ValueError,
                               match='"pallas" takes (bfloat16, not float|widths in multiples of 128, not)'):
                f()
    y, dw = traced(256, backend="pallas")
    assert y().shape == (1408, 256)
    with pytest.raises(ValueError, match="needs a GPU when it is traced"):
        dw()
