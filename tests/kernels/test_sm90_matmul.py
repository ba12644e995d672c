"""The Hopper product on a CPU: simulated threads, barriers and copies give the numbers; lowering for CUDA
gives the rest."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.blockwise_matmul import api, reference, sm90
from pallas_kernels.blockwise_matmul import tiles as tiles_module
from pallas_kernels.blockwise_matmul.tiles import CANDIDATES, FEW_ROWS, FOR_WGRAD, Tiles, choose
from pallas_kernels.numerics import worst_tile
from pallas_kernels.plgpu_compat import INTERPRET
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")
SIMULATED = {  # name: (M, N, K, wgrad, tiles): every schedule, more than one tile a block, ragged edges
    "K of one block": (136, 136, 100, False, Tiles(2, buffers=2)),
    "K of six blocks, fewer stages, two a turn": (72, 72, 700, False, Tiles(2, stages=2, unroll=2)),
    "a cluster": (264, 136, 200, False, Tiles(2, cluster="n", buffers=2)),
    "three consumers, a cluster": (200, 136, 200, False, Tiles(cluster="n", band=2, band_axis=1)),
    "consumers side by side": (40, 136, 136, False, Tiles(1, 3, 64)),
    "one consumer, four products in flight, one left": (40, 136, 600, False,
                                                        Tiles(1, 1, 32, stages=5, flight=4)),
    "one row": (1, 264, 300, False, Tiles(1, 3, 64)),
    "one row, four products in flight": (1, 264, 900, False, Tiles(1, 1, 64, stages=5, flight=4)),
    "five rows": (5, 136, 300, False, Tiles(1, 1, 64, flight=2)),
    "twenty rows, a cluster": (20, 264, 300, False, Tiles(1, 1, 64, cluster="n", stages=3)),
    "products in flight over two tiles": (40, 264, 900, False, Tiles(1, 3, 64, stages=3, flight=2)),
    "a consumer over two blocks": (72, 384, 136, False, Tiles(2, width=192)),
    "twice 64 rows a consumer": (264, 136, 200, False, Tiles(2, high=2, stages=3, buffers=2)),
    "twice 64 rows a consumer, a cluster": (264, 264, 200, False, Tiles(2, high=2, cluster="n")),
    "twice 64 rows a consumer, K of one block": (520, 136, 100, False, Tiles(2, high=2)),
    "twice 64 rows a consumer, K of seven blocks, two a turn": (
        520, 72, 800, False, Tiles(2, high=2, stages=2, unroll=2)),
    "wgrad": (72, 136, 400, True, Tiles(2)),
    "wgrad, few rows": (24, 136, 700, True, Tiles(1, 1, 64, stages=5, flight=4)),
    "wgrad, two products in flight": (264, 136, 700, True, Tiles(2, stages=3, flight=2)),
    "wgrad, twice 64 rows a consumer": (264, 136, 400, True, Tiles(2, high=2)),
    "wgrad, three consumers by 96": (200, 200, 400, True, Tiles(width=96)),
}
SOME = (
    "K of six blocks, fewer stages, two a turn", "a cluster", "twice 64 rows a consumer", "wgrad",
    "twice 64 rows a consumer, K of one block",
    "one consumer, four products in flight, one left", "one row", "one row, four products in flight",
    "five rows",
    "twenty rows, a cluster",
)
VARIANTS = [(False, tiles) for tiles in CANDIDATES.values()] + [(True, tiles) for tiles in FOR_WGRAD.values()]
VARIANTS += [(False, tiles) for tiles in FEW_ROWS.values()]


def operands(m: int, n: int, k: int, wgrad: bool):
    """Random codes, and scales of which no two in reach of each other are alike (as `tile_distinct`)."""
    rng = np.random.default_rng(0)
    codes = (jnp.asarray((64 * rng.normal(size=(rows, k))).astype(q.E4M3)) for rows in (m, n))
    shapes = (m, -(-k // 128)), (n if wgrad else -(-n // 128), -(-k // 128))
    scales = (np.exp2(3.0 * (np.add.outer(np.arange(r), 5 * np.arange(c)) % 13 - 6)) for r, c in shapes)
    (a, b), (a_scale, b_scale) = codes, (jnp.asarray(s, jnp.float32) for s in scales)
    return a, a_scale, b, b_scale


def float64(codes, scale) -> np.ndarray:
    rows = np.repeat(np.asarray(scale, np.float64), 128, 1)[:, : codes.shape[1]]
    rows = rows if len(rows) == len(codes) else np.repeat(rows, 128, 0)[: len(codes)]
    return np.asarray(codes).astype(np.float64) * rows


@pytest.mark.parametrize("name",
                         [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in SIMULATED])
def test_simulated_it_equals_float64(name):
    """Every tile by its own norm: a scale or an operand of another tile is an error over 0.5."""
    m, n, k, wgrad, tiles = SIMULATED[name]
    args = operands(m, n, k, wgrad)
    f = functools.partial(api.wgrad if wgrad else api.blockwise_matmul, backend="pallas", tiles=tiles,
                          interpret=INTERPRET)
    got = f(*args, out_dtype=jnp.float32)
    assert got.shape == (m, n) and got.dtype == jnp.float32
    assert worst_tile(got, float64(*args[:2]) @ float64(*args[2:]).T, (16, 16)) < 1e-5
    if name == "K of one block":
        np.testing.assert_array_equal(f(*args, out_dtype=jnp.bfloat16), got.astype(jnp.bfloat16))


def test_simulated_a_stage_that_is_freed_before_it_is_read_is_a_race(monkeypatch, capfd):
    """Which the other tests here would fail for (`no_races`)."""
    arrived, release = sm90.Consumer.arrived, sm90.Consumer.release
    monkeypatch.setattr(sm90.Consumer, "arrived", lambda self, i: (arrived(self, i), release(self, i))[0])
    monkeypatch.setattr(sm90.Consumer, "release", lambda self, i: None)
    try:
        api.blockwise_matmul(*operands(72, 72, 600, False), backend="pallas", tiles=Tiles(2, stages=2),
                             interpret=INTERPRET)
    except jax.errors.JaxRuntimeError as e:  # JAX 0.12 raises what JAX 0.11 prints
        print(e)
    assert "RACE DETECTED" in capfd.readouterr().out


def shapes(m, n, k, wgrad, a_dtype=q.E4M3, b_dtype=q.E4M3):
    struct, blocks = jax.ShapeDtypeStruct, lambda size: -(-size // 128)
    b_scale = (n, blocks(k)) if wgrad else (blocks(n), blocks(k))
    a = struct((m, k), a_dtype), struct((m, blocks(k)), jnp.float32)
    return *a, struct((n, k), b_dtype), struct(b_scale, jnp.float32)


def lower(args, wgrad=False, **options) -> str:
    f = functools.partial(api.wgrad if wgrad else api.blockwise_matmul, backend="pallas", **options)
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow  # those that are chosen, below
@pytest.mark.parametrize(("wgrad", "tiles"), VARIANTS)
def test_every_candidate_lowers_for_cuda(wgrad, tiles):
    assert "mosaic_gpu" in lower(shapes(4096, 4096, 4096, wgrad), wgrad, tiles=tiles)


@pytest.mark.parametrize(
    ("shape", "wgrad"), [((1, 4096, 4096), False), ((131072, 4096, 12288), False), ((576, 1536, 3001), True)]
)
def test_what_is_chosen_lowers_for_cuda(shape, wgrad):
    assert "mosaic_gpu" in lower(shapes(*shape, wgrad), wgrad)


def test_a_read_that_a_release_may_overtake_is_seen_in_machine_code(monkeypatch):
    """Of a loop as it was: scales read behind a product, the stage released after it. A barrier between them
    orders the two."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "sm90a")
    from machine_code import overtaken_reads

    read, wait, release, meet = (f"        /*{i:04x}*/      {text} ;" for i, text in enumerate((
        "LDS R213, [R151+UR11]", "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "@P1 SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R4+URZ], RZ",
        "BAR.SYNC.DEFER_BLOCKING R2, 0x80")))
    assert overtaken_reads("\n".join((read, wait, release))) == [read.strip()]
    assert not overtaken_reads("\n".join((read, meet, wait, release)))


@pytest.mark.skipif("SM90A" not in os.environ, reason="needs requirements/sm90a.txt: make sm90a")
@pytest.mark.parametrize("name", [name for name, tiles in CANDIDATES.items() if tiles.cluster])
def test_in_the_machine_code_of_a_pair_no_release_overtakes_a_read(name):
    """`machine_code` looks; this lowers what it looks at."""
    lower(shapes(4096, 4096, 24576, False), tiles=CANDIDATES[name])


def test_few_rows_are_shared_by_many_multiprocessors():
    for n, used in (4096, 128), (6144, 96), (24576, 3 * 128):
        tiles = choose(8, n, 4096, b_blocks=True)
        assert tiles.m == 64 and -(-n // tiles.n) == used


# H100 SXM, H100 PCIe, H20
@pytest.mark.parametrize(("multiprocessors", "width"), [(132, 32), (114, 64), (78, 64)])
def test_tiles_are_those_of_the_gpu_that_is_here(monkeypatch, multiprocessors, width):
    """8 x 4096 is 128 tiles of 32 columns: one turn of 132 multiprocessors, two of fewer, which one turn of
    64 columns beats."""
    monkeypatch.setattr(tiles_module, "multiprocessors", lambda: multiprocessors)
    assert choose(8, 4096, 4096, b_blocks=True).n == width


@pytest.mark.parametrize(("mib", "pairs"), [(50, True), (60, False)])  # of an H100, of an H200
def test_pairs_are_taken_where_the_cache_of_the_gpu_that_is_here_is_too_small(monkeypatch, mib, pairs):
    """A band of 8 tiles of 192 rows and 17 of 128 columns, 3,712 together, of 14,336 bytes each: 50.75
    MiB."""
    monkeypatch.setattr(tiles_module, "cache_bytes", lambda: mib * 2**20)
    assert bool(choose(65280, 4096, 14336, b_blocks=True).cluster) == pairs


@pytest.mark.parametrize("m", [4096, 65536])
def test_blocks_read_in_pairs_what_the_cache_does_not_hold(m):
    assert choose(m, 4096, 24576, b_blocks=True).cluster == "n"
    assert not choose(m, 4096, 12288,
                      b_blocks=True).cluster and not choose(m, 4096, 24576, b_blocks=False).cluster


@pytest.mark.parametrize(("rows", "pads"), [(1, 0), (5, 1), (8, 0), (9, 2)])
def test_of_few_rows_little_is_padded(rows, pads):
    """Every pad is a kernel of its own, and a product of few rows is short: one row goes as it is, of some
    their scales."""
    text = lower(shapes(rows, 4096, 4096, False))
    assert text.count("stablehlo.pad") == pads and text.count("stablehlo.slice") == pads // 2


def test_gradients_in_e5m2_lower_for_cuda():
    assert "mosaic_gpu" in lower(shapes(4096, 4096, 4096, False, a_dtype=q.E5M2))
    assert "mosaic_gpu" in lower(shapes(4096, 4096, 4096, True, a_dtype=q.E5M2), wgrad=True)


def test_whole_blocks_are_not_padded():
    text = lower(shapes(4096, 4096, 4096, False))
    assert "stablehlo.pad" not in text and "stablehlo.slice" not in text


def test_on_a_cpu_auto_is_the_reference():
    args = operands(40, 72, 200, False)
    np.testing.assert_array_equal(
        api.blockwise_matmul(*args, out_dtype=jnp.float32), jax.jit(reference.blockwise_matmul)(*args)
    )


def bad(name: str):
    a, a_scale, b, b_scale = shapes(256, 384, 512, False)
    like = lambda s, shape=None, dtype=None: jax.ShapeDtypeStruct(shape or s.shape, dtype or s.dtype)
    return {
        "contraction": ((a, a_scale, like(b, (384, 640)), like(b_scale, (3, 5))),
                r"x \(256, 512\) and w \(384, 640\)"),
        "codes": ((like(a, dtype=jnp.bfloat16), a_scale, b, b_scale),
                  r"x_codes is bfloat16\[256, 512\]: expected float8_e4m3fn"),
        "axes": ((like(a, (2, 128, 512)), a_scale, b, b_scale),
                 r"x_codes is float8_e4m3fn\[2, 128, 512\].*two axes"),
        "row scales": ((a, like(a_scale, (4, 256)), b, b_scale),
                       r"x_scale is float32\[4, 256\].*1x128.*float32\[256, 4\]"),
        "block scales": ((a, a_scale, b, like(b_scale, (4, 3))),
                         r"w_scale is float32\[4, 3\].*128x128.*float32\[3, 4\]"),
        "empty": ((like(a, (0, 512)), like(a_scale, (0, 4)), b, b_scale), r"x_codes \[0, 512\] is empty"),
        "scale type": ((a, like(a_scale, dtype=jnp.bfloat16), b, b_scale), r"x_scale is bfloat16\[256, 4\]"),
    }[name]


@pytest.mark.parametrize("backend", ["pallas", "reference"])
@pytest.mark.parametrize("name", ["contraction", "codes", "axes", "row scales", "block scales", "empty",
                                  "scale type"])
def test_bad_operands_are_errors_at_trace_time(name, backend):
    args, message = bad(name)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(api.blockwise_matmul, backend=backend), *args)


def test_a_bad_result_type_or_backend_is_an_error():
    args = shapes(256, 384, 512, False)
    with pytest.raises(ValueError, match="a result of float16: bfloat16 or float32"):
        jax.eval_shape(functools.partial(api.blockwise_matmul, out_dtype=jnp.float16), *args)
    with pytest.raises(ValueError, match='backend = .triton.: one of "auto", "pallas", "reference"'):
        jax.eval_shape(functools.partial(api.blockwise_matmul, backend="triton"), *args)


def test_tiles_that_do_not_fit_are_errors():
    args = shapes(256, 384, 512, False)
    for tiles, message in {
        Tiles(stages=8): "shared memory",
        Tiles(4): r"4 consumers \(down x across\): 1, 2 or 3",
        Tiles(3, width=160): "multiple of 32, at most 128",
        Tiles(2, width=80): "multiple of 32, at most 192",
        Tiles(stages=1): "at least 2 stages",
        Tiles(2, width=192, buffers=2): "of 64 rows are stored in 3 parts, which buffers must divide",
        Tiles(3, high=2): r"64 or 2 x 64 rows \(high\), three only for 64",
        Tiles(2, width=192, high=2): "multiple of 32, at most 128",
        Tiles(1, 3, 64, flight=4): "have 64 rows each and come from at most 3 stages",
        Tiles(unroll=0): "unroll must be at least 1",
        Tiles(2, flight=2, unroll=2): "1 if products are in flight",
        Tiles(1, 3, 32, stages=3, flight=4): "have 64 rows each and come from at most 3 stages",
        Tiles(cluster="m"): "pairs of blocks lie along N",
    }.items():
        with pytest.raises(ValueError, match=message):
            lower(args, tiles=tiles)
    with pytest.raises(ValueError, match="may still be reading scales of 1x128"):
        lower(shapes(256, 384, 512, True), wgrad=True, tiles=Tiles(cluster="n"))
