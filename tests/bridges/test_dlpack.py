"""JAX arrays as torch tensors: same bytes, same address, and what holds the memory."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bridges.sources import dlpack  # noqa: E402

TYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]


def array(dtype: str, shape=(32, 48)) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape)).astype(dtype)


def codes(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", TYPES)
def test_view_is_the_same_memory(dtype):
    a = array(dtype)
    view = dlpack.torch_view(a)
    assert view.dtype is getattr(torch, dtype) and tuple(view.shape) == a.shape and view.is_contiguous()
    assert view.data_ptr() == a.unsafe_buffer_pointer()
    np.testing.assert_array_equal(view.view(torch.uint8).cpu().numpy(), codes(a))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_fp8_code_survives(dtype):
    a = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    view = dlpack.torch_view(a)
    assert view.dtype is getattr(torch, dtype)
    np.testing.assert_array_equal(view.view(torch.uint8).cpu().numpy(), np.arange(256, dtype=np.uint8))


def test_view_outlives_the_array():
    a = array("bfloat16", (512, 512))
    want, view = codes(a).copy(), dlpack.torch_view(a)
    del a
    gc.collect()
    churn = [jnp.zeros((512, 512), jnp.bfloat16) for _ in range(8)]
    np.testing.assert_array_equal(view.view(torch.uint8).cpu().numpy(), want)
    assert len(churn) == 8


def test_donation_of_a_viewed_array_spares_the_view():
    a = array("bfloat16", (512, 512))
    want, view = codes(a).copy(), dlpack.torch_view(a)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(a).block_until_ready()
    assert doubled.unsafe_buffer_pointer() != view.data_ptr()
    np.testing.assert_array_equal(view.view(torch.uint8).cpu().numpy(), want)


def test_waits_for_the_array():
    a = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: y @ x / 256, x))(jnp.ones((256, 256)))
    np.testing.assert_array_equal(dlpack.torch_view(a).cpu().numpy(), np.asarray(a))


def test_numpy_arrays_pass_and_what_cannot_travel_is_refused():
    x = np.arange(6, dtype=np.float32)
    assert dlpack.torch_view(x).data_ptr() == x.ctypes.data
    with pytest.raises(TypeError, match="list has no __dlpack__"):
        dlpack.torch_view([1.0, 2.0])
