"""A stack of weights is quantised layer by layer, whatever carries it out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.quantize import reference

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("shape",
                         [(256, 128), (200, 96), (3, 256, 128), (3, 200, 128), (2, 2, 128, 320), (3, 8, 40)])
def test_layers_share_no_block(shape):
    w = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16) * jnp.exp(jnp.arange(shape[-1]) / 64)
    got, want = jax.jit(QuantizedWeight.of)(w), reference.quantize_blocks(w)
    np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8), np.asarray(want[0]).view(np.uint8))
    np.testing.assert_array_equal(got.scale, want[1])
