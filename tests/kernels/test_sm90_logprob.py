"""The Hopper kernels of log-probabilities on a CPU: simulated for the numbers, lowered for CUDA for the
rest."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.logprob import api, parts, reference, sm90
from pallas_kernels.logprob.sm90 import Tiles
from pallas_kernels.numerics import relative_l2
from pallas_kernels.plgpu_compat import INTERPRET

pytestmark = pytest.mark.usefixtures("quick_compile")
SIMULATED = {  # name: (M, N, K, tiles): every schedule, more than one tile a block, ragged edges
    "pairs along the tokens": (512, 320, 128, Tiles()),
    "pairs, an odd number of whole tiles": (256, 384, 192, Tiles(n=128, band=2, band_axis=1)),
    "single": (256, 320, 64, Tiles(n=128, cluster="", stages=2)),
}


def drawn(m: int, n: int, k: int, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(m, k)),
                       dtype), jnp.asarray(rng.normal(size=(n, k)) * 4 / k**0.5, dtype)
    return x, w, jnp.asarray(rng.integers(-5, n + 5, size=m), jnp.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("cap", [{}, {"softcap": 5.0}], ids=["", "capped"])
def test_simulated_they_equal_the_reference(name, cap):
    *shape, tiles = SIMULATED[name]
    args = *drawn(*shape), 0.7, jnp.dtype(jnp.bfloat16)
    found = api._merged(sm90.statistics(*args, tiles, INTERPRET, **cap))
    want = reference.statistics(*args, **cap)
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
    lse = want[0] + jnp.log(want[1])
    vectors = lse, *jnp.asarray(np.random.default_rng(1).normal(size=(3, shape[0])), jnp.float32)
    args = *args[:3], *vectors, *args[3:]
    got, want = sm90.d_logits(*args, tiles, INTERPRET, **cap), reference.d_logits(*args, **cap)
    assert got.dtype == jnp.bfloat16 and relative_l2(got, want) < 1e-4
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=8e-3, atol=2e-5)


@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.slow), 5.0])
def test_simulated_forward_and_backward_equal_the_reference(softcap):
    """Rows that are no whole tiles, words that are no whole boxes, blocks of them of which the last reaches
    over the end, and a third of the rows dead."""
    x, w, y = drawn(200, 549, 64)
    options = dict(live=jnp.arange(200) % 3 > 0, temperature=0.7, memory=2 * 256 * (256 + 128),
                   softcap=softcap)

    def run(**backend):
        found, pull = jax.vjp(lambda x, w: api.linear_logprob(x, w, y % 549, **options, **backend), x, w)
        return *found, *pull((jnp.cos(jnp.arange(200.0)), jnp.sin(jnp.arange(200.0))))

    for got, want in zip(run(backend="pallas", interpret=INTERPRET), run(backend="reference")):
        assert got.dtype == want.dtype and relative_l2(got, want) < 2e-3
        np.testing.assert_array_equal(got == 0, want == 0)


struct = jax.ShapeDtypeStruct


def shapes(m: int = 16384, n: int = 151936, k: int = 4096, dtype=jnp.bfloat16):
    return struct((m, k), dtype), struct((n, k), dtype), struct((m,), jnp.int32)


def lower(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "tiles",
    [Tiles(), *(pytest.param(t, marks=pytest.mark.slow) for *_, t in SIMULATED.values() if t != Tiles()),
     Tiles(n=128, stages=6), pytest.param(Tiles(band=16), marks=pytest.mark.slow)],
)
def test_every_schedule_lowers_for_cuda(tiles):
    more = 1.0, jnp.dtype(jnp.float32), tiles
    assert "mosaic_gpu" in lower(lambda *args: sm90.statistics(*args, *more), *shapes())
    vectors = [struct((16384,), jnp.float32)] * 4
    assert "mosaic_gpu" in lower(lambda *args: sm90.d_logits(*args, *more), *shapes(n=8192), *vectors)


def test_gemmas_vocabulary_with_a_soft_cap_lowers_for_cuda():
    f = functools.partial(api.linear_logprob, backend="pallas", softcap=30.0)
    vector = struct((4096,), jnp.float32)
    assert "mosaic_gpu" in lower(functools.partial(both, f), *shapes(4096, 262144, 640), vector, vector)


def both(f, x, w, y, g, h, *live):
    found, pull = jax.vjp(lambda x, w: f(x, w, y, *live), x, w)
    return found, pull((g, h))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lowered_for_cuda_no_array_is_as_large_as_the_logits(dtype, masked):
    m, n, k = 16383, 151936, 4096
    vector = struct((m,), jnp.float32)
    f = functools.partial(both, functools.partial(api.linear_logprob, backend="pallas"))
    text = lower(f, *shapes(m, n, k, dtype), vector, vector, *[struct((m,), bool)] * masked)
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1 + api.CAPACITIES
    sizes = (np.prod([int(d) for d in dims.split("x")[:-1]])
             for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]", text))
    assert max(sizes) == n * k < m * n / 3


def test_a_devices_part_of_the_vocabulary_lowers_for_cuda():
    mesh = AbstractMesh((8,), ("vocab",), (AxisType.Auto,))
    f = functools.partial(api.linear_logprob, backend="pallas", axis_name="vocab")
    f = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("vocab"), P()), out_specs=(P(), P()), check_vma=False)
    vector = struct((512,), jnp.float32)
    # that many a device; Qwen3's 151,936 over 4 of them are 593 boxes and a half each
    for words in (1024, 37984 // 8, 50):
        assert "mosaic_gpu" in lower(functools.partial(both, f), *shapes(512, 8 * words, 256), vector, vector)


def test_on_a_cpu_auto_is_the_reference():
    x, w, y = drawn(40, 200, 72)
    for a, b in zip(*(api.linear_logprob(x, w, y % 200, backend=b) for b in ("auto", "reference"))):
        np.testing.assert_array_equal(a, b)


BAD = {
    "widths": (lambda x, w, y: (x, struct((640, 128), x.dtype), y),
         r"x is bfloat16\[512, 256\], w bfloat16\[640, 128\]: expected x \[M"),
    "types": (lambda x, w, y: (x, struct(w.shape, jnp.float32), y),
              r"w float32\[640, 256\]: expected one dtype of bfloat16, float16"),
    "integers": (lambda x, w, y: (struct(x.shape, jnp.int32), struct(w.shape, jnp.int32), y),
                 "expected one dtype of bfloat16"),
    "axes": (lambda x, w, y: (struct((2, 256, 256), x.dtype), w, y),
             r"x is bfloat16\[2, 256, 256\].*x \[M, K\]"),
    "empty": (lambda x, w, y: (struct((0, 256), x.dtype), w, y), "with M, N and K above 0"),
    "targets": (lambda x, w, y: (x, w, struct((511,), jnp.int32)),
                r"targets is int32\[511\]: expected an integer per row of x, \[512\]"),
    "target type": (lambda x, w, y: (x, w, struct((512,), jnp.float32)), r"targets is float32\[512\]"),
    "live": (lambda x, w, y: (x, w, y, struct((512,), jnp.int32)),
             r"live is int32\[512\]: expected a bool per row of x, \[512\]"),
}


@pytest.mark.parametrize("backend", ["pallas", "reference"])
@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_errors_at_trace_time(name, backend):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(api.linear_logprob, backend=backend),
                       *change(*shapes(512, 640, 256)))


@pytest.mark.parametrize(
    ("shape", "why"),
    [(dict(dtype=jnp.float32), "bfloat16 or float16, not float32"), (dict(k=100), "multiples of 64, not 100")]
)
def test_what_the_kernels_cannot_take_is_an_error_where_they_are_asked_for_by_name(shape, why):
    with pytest.raises(ValueError, match=f'backend = "pallas" takes .*{why}; x is .*use "auto"'):
        jax.eval_shape(functools.partial(api.linear_logprob, backend="pallas"),
                       *shapes(**dict(m=512, n=640, k=256) | shape))


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(temperature):
    for backend in ("pallas", "reference"):
        with pytest.raises(ValueError,
                           match=f"temperature = {temperature}: logits are divided by a finite "
                                 f"number above 0"):
            f = functools.partial(api.linear_logprob, temperature=temperature, backend=backend)
            jax.eval_shape(f, *shapes(512, 640, 256))


def test_tiles_that_do_not_fit_are_errors():
    bad = {Tiles(stages=6): "shared memory", Tiles(n=320): "words", Tiles(stages=1): "stages",
           Tiles(cluster="n"): "the tokens"}
    for tiles, message in bad.items():
        with pytest.raises(ValueError, match=message):
            lower(functools.partial(api.linear_logprob, backend="pallas", tiles=tiles),
                  *shapes(512, 640, 256))


@pytest.mark.parametrize("words", [700, 40_000])
def test_simulated_the_statistics_of_parts_are_joined_row_by_row(words):
    P, rng = -(-words // parts.PART), np.random.default_rng(0)
    highest = jnp.asarray(rng.normal(size=(P, 3)) * 8.0 ** np.arange(3), jnp.float32)
    total = jnp.asarray(rng.uniform(1, 256, (P, 3)), jnp.float32)
    z = highest.max(0) - jnp.arange(3.0)
    joined = functools.partial(parts.logprob, backend="pallas", interpret=INTERPRET)
    wanted = np.asarray(z, np.float64) - jax.nn.logsumexp(highest + jnp.log(total), axis=0)
    found = joined(z, highest, total)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(joined(z[1:2], highest[:, 1:2], total[:, 1:2]), found[1:2])
    traced = jax.jit(functools.partial(parts.logprob, backend="pallas")).trace(z, highest, total)
    assert "sums_of_parts" in traced.lower(lowering_platforms=("cuda",)).as_text()
