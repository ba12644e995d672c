"""What the update quantises by the Hopper kernel are the reference's bits, a stack of layers at once or a
layer at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.numerics import tile_distinct
from pallas_kernels.quantize import reference


@pytest.mark.parametrize("shape", [(4, 1024, 2048), (3, 200, 256), (2, 576, 1536), (1, 128, 96)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_bits_are_the_references(shape, dtype):
    w = jnp.asarray(tile_distinct((shape[0] * shape[1], shape[2]), (128, 128),
                                  seed=1)).reshape(shape).astype(dtype)
    want = jax.jit(reference.quantize_blocks)(w)
    for got in (rounding_exact_jit(QuantizedWeight.of)(w),
                rounding_exact_jit(lambda w: jax.lax.map(QuantizedWeight.of, w))(w)):
        np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8),
                                      np.asarray(want[0]).view(np.uint8))
        np.testing.assert_array_equal(got.scale, want[1])
