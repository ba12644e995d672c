"""Emulated FP4: the formats beside numpy, the laws of the recipe's ingredients, and the figures of the
papers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision import fake_fp4 as f
from pallas_kernels.four_bits import e2m1_codes, e2m1_values

pytestmark = pytest.mark.usefixtures("quick_compile")
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NVFP4 = f.Fp4Recipe()
NAIVE = f.Fp4Recipe(square=False, rotate=False, stochastic=False)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def nearest(x: np.ndarray) -> np.ndarray:
    """The E2M1 number nearest to each, by search; ties are not among random numbers."""
    return np.sign(x) * GRID[np.abs(np.abs(x)[..., None] - GRID).argmin(-1)]


def test_e2m1_is_the_checkpoints_format_ties_included():
    x = jnp.asarray(np.concatenate([np.linspace(-7, 7, 5601), (GRID[1:] + GRID[:-1]) / 2]).astype(np.float32))
    np.testing.assert_array_equal(f.e2m1(x), e2m1_values(e2m1_codes(x)))


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_nvfp4_is_what_numpy_makes_by_the_papers_formulas(block):
    import ml_dtypes

    x = np.asarray(normal(1, 32, 64)) * np.geomspace(0.1, 30, 64, dtype=np.float32)
    got = np.asarray(f.nvfp4(jnp.asarray(x), block))
    encode = np.float32(6 * 448) / np.abs(x).max()
    for i in range(0, 32, block[0]):
        for j in range(0, 64, 16):
            tile = np.s_[i : i + block[0], j : j + 16]
            scale = np.abs(x[tile]).max() / np.float32(6) * encode
            scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            np.testing.assert_allclose(got[tile], nearest(x[tile] * (encode / scale)) * scale / encode,
                                       rtol=1e-6)
    np.testing.assert_array_equal(f.nvfp4(jnp.zeros((16, 16)), block), 0)


@pytest.mark.parametrize("quantize, error", [
    (f.nvfp4, 0.0951), (f.mxfp4, 0.1154), (f.with_macro_scale, 0.1087), (f.with_residual, 0.0577),
    (lambda x: f.with_residual(x, f.with_macro_scale), 0.0544)],
                         ids=["NVFP4", "MXFP4", "MBS", "OF", "MBS + OF"])
def test_errors_of_gaussians_are_the_papers(quantize, error):
    x = normal(3, 256, 1024)
    assert float(jnp.linalg.norm(quantize(x) - x) / jnp.linalg.norm(x)) == pytest.approx(error, rel=0.01)


def test_the_parts_of_mxfp4s_error_add_up_to_it():
    """Shares and cosine for Gaussians are those of 2605.20402's definitions; `dead` has no part in the
    others."""
    x = normal(3, 256, 1024)
    parts, error = f.decomposed(x), f.mxfp4(x) - x
    np.testing.assert_allclose(sum(parts), error, atol=1e-6)
    share = [float(jnp.sum(p * p) / jnp.sum(error * error)) for p in parts]
    np.testing.assert_allclose(share, [1.773, 0.020, 0.747], rtol=0.02, atol=1e-3)
    cosine = jnp.sum(parts.scale * parts.grid) / jnp.linalg.norm(parts.scale) / jnp.linalg.norm(parts.grid)
    assert float(cosine) == pytest.approx(-0.669, abs=0.01)
    assert not (parts.dead * parts.scale).any() and not (parts.dead * parts.grid).any() and parts.dead.any()
    assert (jnp.abs(f.mxfp4(x, scale="down")) < jnp.abs(x) - 0.4).any()  # OCP's scale clips


def test_a_rotation_is_orthogonal_and_cancels_in_a_product():
    signs, a, b = f.hadamard_signs(), normal(4, 24, 64), normal(5, 40, 64)
    h = np.asarray(f.rotated(jnp.eye(16), signs))
    np.testing.assert_allclose(h @ h.T, np.eye(16), atol=1e-6)
    assert set(np.abs(h).ravel()) == {0.25} and (signs < 0).any() and (signs > 0).any()
    np.testing.assert_allclose(f.rotated(a, signs) @ f.rotated(b, signs).T, a @ b.T, rtol=1e-6, atol=1e-5)
    spike = jnp.zeros((1, 16)).at[0, 3].set(8.0)
    assert float(jnp.abs(f.rotated(spike, signs)).max()) == 2.0  # an outlier is spread over its 16


def test_stochastic_rounding_has_the_right_mean_and_nearest_has_not():
    """The mean of n draws lies within 5 standard errors; small gradients vanish to the nearest."""
    x = jnp.asarray(np.float32([0.1, -0.2, 0.7, 1.2, 2.3, -3.9, 5.5, 6.0]))
    draws = np.asarray(jax.vmap(lambda k: f.e2m1(x, k))(jax.random.split(jax.random.key(0), 20_000)),
                       np.float64)
    assert set(np.abs(draws).ravel()) <= set(GRID)
    assert (np.abs(draws.mean(0) - np.asarray(x)) <= 5 * draws.std(0) / np.sqrt(len(draws)) + 1e-6).all()
    assert np.abs(np.asarray(f.e2m1(x))[:2]).max() == 0


@pytest.mark.parametrize("recipe", [NVFP4, NAIVE], ids=["whole", "naive"])
def test_a_squares_weight_is_one_matrix_in_forward_and_backward(recipe):
    """And otherwise it is two: 1x16 along K, and along N."""
    x, w, dy = normal(6, 32, 32), normal(7, 32, 32), normal(8, 32, 32)
    forward, of_dgrad = f.nvfp4(w, (16, 16)), f.nvfp4(w.T, (16, 16)).T
    np.testing.assert_array_equal(forward, of_dgrad)
    turn = lambda a: f.rotated(a, f.hadamard_signs())
    if not recipe.square:
        forward, of_dgrad, turn = f.nvfp4(w), f.nvfp4(w.T).T, lambda a: a
        assert (forward != of_dgrad).any()
    key = jax.random.key(0)
    y, back = jax.vjp(lambda x, w: f.fp4_linear(recipe, x, w, key), x, w)
    np.testing.assert_allclose(y, f.nvfp4(x) @ forward.T, rtol=1e-5, atol=1e-4)
    first, second = jax.random.split(key) if recipe.stochastic else (None, None)
    dx, dw = back(dy)
    np.testing.assert_allclose(dx, f.nvfp4(dy, key=first) @ of_dgrad, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, f.nvfp4(turn(dy.T), key=second) @ f.nvfp4(turn(x.T)).T, rtol=1e-5,
                               atol=1e-4)


def test_a_blocks_scale_needs_the_tensors_outside_e4m3s_range():
    x = 1e-5 * normal(9, 16, 64)
    assert not f.nvfp4(x, tensor_scale=False).any()
    assert float(jnp.linalg.norm(f.nvfp4(x) - x) / jnp.linalg.norm(x)) < 0.11


def test_the_estimators_slope_is_the_papers():
    """0.2 on the grid, 3 between, in the mean of a bin 1 without the cap and 0.593 with it."""
    np.testing.assert_allclose(f.dge_factor(jnp.asarray(np.float32([0.0, 0.5, 2, 3, 0.25, 2.5, -5, 7]))),
                               [0.2, 0.2, 0.2, 0.2, 3, 3, 3, 0], rtol=1e-5)
    u = (jnp.arange(100_000) + 0.5) * 6 / 100_000
    u0 = 15**-1.25
    assert float(f.dge_factor(u).mean()) == pytest.approx(3 * u0 + 1 - u0**0.2, abs=2e-3)
    assert float(f.dge_factor(u, cap=1e9).mean()) == pytest.approx(1, abs=0.1)


def test_outliers_that_are_cut_off_come_back_in_high_precision():
    x = normal(10, 64, 128).at[5, 7].set(60.0)
    w, y = normal(11, 32, 128), lambda *how: f.dge_linear(*how, x, w)
    error = lambda got: float(jnp.linalg.norm(got - x @ w.T))
    assert error(y(False, 0.99, True)) < error(y(False, None, False)) < error(y(False, 0.99, False))
    grads = [jax.grad(lambda w, dge=dge: f.dge_linear(dge, None, False, x, w).sum())(w)
             for dge in (True, False)]
    scale = jnp.abs(w).max(-1, keepdims=True) / 6
    np.testing.assert_allclose(grads[0], grads[1] * f.dge_factor(w / scale), rtol=1e-5)


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="16x16 do not divide 24x64"):
        f.nvfp4(jnp.zeros((24, 64)), (16, 16))


def test_gaps_of_the_benchmark_are_paired_by_seed():
    from benchmarks.fp4_recipes import Trained, rows_of

    of = lambda *losses: {seed: Trained(found, [], 0.0) for seed, found in enumerate(losses)}
    runs = {"float32": of(1.0, 2.0, 1.5), "nvfp4": of(1.1, 2.2, 1.8), "nvfp4, naive": of(1.2, 2.3, 1.9)}
    mean, half, *_, worse, surely = rows_of(runs)
    assert worse["yardstick_name"] == "nvfp4" and (worse["ours"],
                                                   surely["ours"]) == pytest.approx((0.1, 0), abs=1e-9)
    assert mean["ours"] == pytest.approx(0.2) and half["ours"] == pytest.approx(4.3027 * 0.1 / 3**0.5,
                                                                                rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["nvfp4", "rows, DGE and OCC", "mxfp4, MBS and OF"])
def test_a_small_language_model_learns_in_emulated_fp4(arm):
    from benchmarks.fp4_recipes import ARMS, trainer

    assert trainer(ARMS[arm], 60)(0).loss < 2.2 < np.log(13)
