"""Arrays kept in few bits: error bounds, exactness, stochastic rounding without bias, bytes, and the memory
of an update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.config.learning import Optim
from jaxfp8rl.optim.adamw import Formats, adamw
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.optim.low_bit import (
    CODES,
    DTYPES,
    Scaled,
    add_to,
    decode,
    encode,
    nbytes,
    random_bits,
    round_stochastically,
)
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.numerics import tile_distinct

pytestmark = pytest.mark.usefixtures("quick_compile")

NARROW = ("bfloat16", "float16", "float8")
LARGEST = {"float16": 65504.0, "float8": 448.0}
LEAST = {"float16": 2.0**-24, "float8": 2.0**-9}  # spacing below the least normal number
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float8": 2.0**-4}  # half a spacing over the number
encoded, encode_faint = jax.jit(encode, static_argnums=1), jax.jit(encode, static_argnums=(1, 3))
stochastic = jax.jit(round_stochastically, static_argnums=1)


def magnitudes(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers, each block of 128 of its own magnitude from 2^-60 to 2^60, a tenth of the elements far
    below it, some 0."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.where(rng.random(shape) < 0.1, 2.0 ** rng.integers(-30, 0, shape), 1)
    blocks = -(-shape[-1] // 128)
    x *= np.repeat(2.0 ** rng.integers(-60, 61, (*shape[:-1], blocks)), 128, -1)[..., : shape[-1]]
    return np.where(rng.random(shape) < 0.05, 0, x).astype(np.float32)


def words(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.bits(jax.random.key(seed), shape, jnp.uint32)


def block_amax(x: np.ndarray) -> np.ndarray:
    """The largest of an element's block, [..., K]."""
    padded = np.pad(np.abs(x), [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 128)])
    amax = padded.reshape(*x.shape[:-1], -1, 128).max(-1)
    return np.repeat(amax, 128, -1)[..., : x.shape[-1]]


def bits_of(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("kept_as", NARROW)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_read_is_within_a_rounding_of_what_was_written(kept_as, rounding):
    """Half a spacing to nearest, one stochastically, where a spacing is of the number, or of the block's
    largest."""
    x = magnitudes((6, 5, 384))
    back = decode(encoded(x, kept_as, words(x.shape) if rounding == "stochastic" else None))
    bound = RELATIVE[kept_as] * np.abs(x)
    if kept_as in CODES:  # the scale is under 2 amax / LARGEST
        bound = np.maximum(bound, block_amax(x) * LEAST[kept_as] / LARGEST[kept_as])
    assert np.all(np.abs(back - x) <= bound * (2 if rounding == "stochastic" else 1))
    assert np.isfinite(back).all() and np.all(np.asarray(back)[x == 0] == 0)


@pytest.mark.parametrize("kept_as", NARROW)
def test_what_was_read_is_written_as_it_is_however_it_is_rounded(kept_as):
    """The numbers, that is: a block whose largest was rounded to half of what its scale can hold gets half
    the scale."""
    back = decode(encoded(magnitudes((64, 384)), kept_as, None))
    for seed in range(3):
        np.testing.assert_array_equal(decode(encoded(back, kept_as, words(back.shape, seed))), back)


def test_bfloat16_weights_are_kept_exactly_in_float16_and_bfloat16():
    """A model's weights start a run as they are, unless a block spans more than float16 does."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 256)) * 0.02, jnp.bfloat16).astype(jnp.float32)
    for kept_as in ("float16", "bfloat16"):
        np.testing.assert_array_equal(decode(encoded(x, kept_as, words(x.shape))), x)


@pytest.mark.parametrize("kept_as", list(CODES))
def test_scales_are_the_least_powers_of_two_that_hold_the_block(kept_as):
    x = magnitudes((64, 256))
    kept = encoded(x, kept_as, words(x.shape))
    scale, amax = np.asarray(kept.scale, np.float64), block_amax(x)[:, ::128].astype(np.float64)
    fraction, _ = np.frexp(scale)
    assert np.all(fraction == 0.5) and np.all(amax <= LARGEST[kept_as]
                                              * scale) and np.all(amax > LARGEST[kept_as] * scale / 2)
    zero = encoded(np.zeros((2, 128), np.float32), kept_as, words((2, 128)))
    assert np.all(np.asarray(zero.scale) > 0) and np.all(np.asarray(decode(zero)) == 0)


@pytest.mark.parametrize("kept_as", NARROW)
def test_the_mean_over_all_bits_is_the_number_itself(kept_as):
    """Every value of the bits that are used, once: the mean is exact, not nearly so."""
    dtype = DTYPES[kept_as]
    spare = 23 - jnp.finfo(dtype).nmant
    every = (jnp.arange(2**spare, dtype=jnp.uint32) << (32 - spare)).astype(jnp.uint32)
    for x in (1.0, -1.0001, 1 / 3, -2.9999998, 0.0173, 15.999999, 0.1):
        x = np.float32(x)
        got = np.asarray(stochastic(jnp.full(every.shape, x), dtype, every), np.float64)
        assert got.mean() == x and len(set(got)) == (1 if np.float64(x) == np.float64(x.astype(dtype)) else 2)


@pytest.mark.parametrize("kept_as", list(CODES))
def test_below_the_least_normal_number_the_mean_holds_too(kept_as):
    tiny = np.float32(LEAST[kept_as])
    x = jnp.repeat(tiny * jnp.asarray([0.013, 0.5, 1.7, 6.25]), 2**16).reshape(4, -1)
    mean = np.asarray(stochastic(x, DTYPES[kept_as], words(x.shape)), np.float64).mean(1) / tiny
    np.testing.assert_allclose(mean, [0.013, 0.5, 1.7, 6.25], atol=5 * 0.5 / 2**8)  # five standard deviations


@pytest.mark.parametrize("kept_as", list(CODES))
def test_faint_numbers_go_down_or_up_and_the_others_as_before(kept_as):
    """Below the type's least normal number in their block: towards zero or away from it, by less than a
    spacing."""
    x = magnitudes((64, 256))
    kept = {faint: encode_faint(x, kept_as, words(x.shape), faint) for faint in ("stochastic", "down", "up")}
    back = {faint: np.abs(np.asarray(decode(k), np.float64)) for faint, k in kept.items()}
    scale = np.repeat(np.asarray(kept["up"].scale), 128, -1)
    faint = np.abs(x) / scale < float(jnp.finfo(DTYPES[kept_as]).smallest_normal)
    assert np.mean(faint & (x != 0)) > 0.01 and np.all((back["up"] > 0) == (x != 0))
    spacing = LEAST[kept_as] * scale
    assert np.all((back["down"] <= np.abs(x)) & (np.abs(x) < back["down"] + spacing), where=faint)
    assert np.all((back["up"] >= np.abs(x)) & (np.abs(x) > back["up"] - spacing), where=faint & (x != 0))
    for b in ("down", "up"):
        assert np.all((back[b] == back["stochastic"]) | faint)


def test_stochastic_rounding_crosses_powers_of_two_and_keeps_signs():
    below = np.nextafter(np.float32(2), np.float32(0))
    for kept_as in NARROW:
        got = stochastic(jnp.asarray([below, -below, -0.0]), DTYPES[kept_as],
                         jnp.full(3, 2**32 - 1, jnp.uint32))
        assert np.asarray(got, np.float32).tolist() == [2.0, -2.0,
                                                        0.0] and np.signbit(np.asarray(got, np.float32)[2])


def test_words_are_uniform_and_know_nothing_of_each_other():
    """Every bit is set half of the time; words of neighbours, layers, updates and of one element are
    uncorrelated."""
    shape = (64, 1024)
    draw = lambda seed, layer: random_bits(jax.random.bits(jax.random.key(seed), (2,), jnp.uint32), layer,
                                            shape)
    (a, b, c), (above, _, _), (later, _, _) = draw(3, 0), draw(3, 1), draw(4, 0)
    for word in (a, b, c):
        share = [float(jnp.mean((word >> bit) & 1)) for bit in range(7, 32)]  # the bits that rounding uses
        np.testing.assert_allclose(share, 0.5, atol=5 * 0.5 / 256)
    unit = lambda word: np.asarray(word >> 8, np.float64) / 2**24 - 0.5
    for other in (b, c, above, later, jnp.roll(a, 1, 1), jnp.roll(a, 1, 0), jnp.roll(a, 128, 1), (a << 16)):
        assert abs(np.corrcoef(unit(a).ravel(), unit(other).ravel())[0, 1]) < 5 / 256
    assert abs(np.corrcoef(unit(b).ravel(), unit(c).ravel())[0, 1]) < 5 / 256


@pytest.mark.parametrize("kept_as", list(CODES))
@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow),
                                   pytest.param(127, marks=pytest.mark.slow), 300])
def test_a_width_that_is_no_multiple_of_128_ends_in_a_shorter_block(kept_as, width):
    """As if zeros followed; and each row is kept by itself, whatever the array's other axes."""
    x, bits = magnitudes((3, width)), words((3, width))
    fill = [(0, 0), (0, -width % 128)]
    kept, padded = encoded(x, kept_as, bits), encoded(np.pad(x, fill), kept_as, jnp.pad(bits, fill))
    assert bits_of(kept) == bits_of(Scaled(padded.codes[:, :width], padded.scale))
    assert bits_of(kept) == bits_of(encoded(x[:, None], kept_as, bits[:, None]))
    assert nbytes(x.shape, kept_as) == sum(a.nbytes for a in kept)


def test_a_scale_belongs_to_its_own_block():
    """Each block its own magnitude: a scale of another block would show as an error near 1."""
    x = tile_distinct((256, 512), (1, 128), seed=0)
    back = np.asarray(decode(encoded(x, "float8", None)))
    blocks = lambda a: np.linalg.norm(a.reshape(256, 4, 128), axis=-1)
    assert np.all(blocks(back - x) < 0.04 * blocks(x))


@pytest.mark.parametrize("formats", [Formats("bfloat16", "float8", "bfloat16", offload=True)])
def test_with_offload_an_update_takes_a_few_copies_of_one_layer_of_one_parameter(formats):
    """Of 2 layers and of 8, of 1 parameter and of 3: the compiled update's temporaries are the same, and its
    states donated. (Without offload a GPU needs none: tests/gpu/test_optim.py.)"""
    layer = 256 * 256 * 4

    def memory(layers: int, names: str):
        cfg, struct = Optim(weight_decay=0.1), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        optimizer = adamw(cfg, make_schedule(cfg, 10), formats)
        grads = {"embed": struct(16, 256), "layers": {name: struct(layers, 256, 256) for name in names}}
        state = jax.eval_shape(lambda params: init_state(params, optimizer), grads)
        step = rounding_exact_jit(lambda *args: guarded_update(optimizer, *args), donate_argnums=0)
        found = step.lower(state, struct(), grads).compile().memory_analysis()
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
        assert found.alias_size_in_bytes >= kept
        return found.temp_size_in_bytes

    small, large = memory(2, "a"), memory(8, "abc")
    assert large < small + 0.1 * layer and large < 6 * layer


added = jax.jit(add_to)


def test_a_sum_in_float32_is_the_plain_sum():
    a, b = magnitudes((3, 256)), magnitudes((3, 256), 1)
    np.testing.assert_array_equal(added(jnp.asarray(a), jnp.asarray(b)), a + b)


def test_a_sum_in_bfloat16_is_a_neighbour_of_the_sum_and_exact_where_it_can_be():
    total = jnp.asarray(magnitudes((5, 300)), jnp.bfloat16)
    x = jnp.asarray(magnitudes((5, 300), 1))
    exact = np.asarray(total, np.float32) + np.asarray(x)
    got = np.asarray(added(total, x), np.float32)
    assert (np.abs(got - exact) <= np.abs(exact) * 2 * RELATIVE["bfloat16"]).all()
    np.testing.assert_array_equal(added(total, jnp.zeros_like(x)), total)
    assert bits_of(added(total, x)) == bits_of(added(total, x))


def test_the_sum_of_many_has_the_right_mean():
    """To nearest, a sum of 1 and many thousandths stays 1."""
    x = jnp.asarray(np.random.default_rng(0).uniform(0.0005, 0.0015, (64, 1, 4096)).astype(np.float32))
    total, nearest = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((1, 4096), jnp.bfloat16)
    for part in x:
        total, nearest = added(total, part), (nearest + part).astype(jnp.bfloat16)
    exact = float(1 + x.sum(0).mean())
    assert abs(float(total.astype(jnp.float32).mean()) - exact) < 5e-4 < exact - float(
        nearest.astype(jnp.float32).mean())


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_sum_that_is_not_finite_stays_so(bad):
    ones, other = jnp.ones((1, 512)), jnp.full((1, 512), jnp.float32(bad))
    for total, x in ((ones, other), (other, ones)):
        assert not np.isfinite(np.asarray(added(total.astype(jnp.bfloat16), x), np.float32)).any()
