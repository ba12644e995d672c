"""An FP8 linear in a Flax NNX model: one argument, and its gradient checked beside the layer without it.

    python examples/fp8_linear_in_nnx.py

On a Hopper GPU all three products of the layer, forward and backward, are FP8 kernels. Elsewhere the
reference computes the same codes and scales, and says so. Needs flax and chex.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from pallas_kernels import fp8_dot_general

WIDTH, TOKENS = 256, 512
FP8_ERROR = 0.08  # of a gradient's norm: each of a product's operands brings 0.026, and these are two layers


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, **how):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, dtype=jnp.bfloat16, rngs=rngs, **how)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs, **how)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.silu(self.up(x)))


def loss(model: MLP, x: Array, target: Array) -> Array:
    return jnp.mean(jnp.square(model(x).astype(jnp.float32) - target))


def main() -> None:
    fp8, plain = MLP(nnx.Rngs(0), dot_general=fp8_dot_general), MLP(nnx.Rngs(0))
    x, target = (jax.random.normal(jax.random.key(i), (TOKENS, WIDTH)) for i in range(2))
    gradients = [nnx.jit(nnx.grad(loss))(model, x, target) for model in (fp8, plain)]
    chex.assert_tree_all_finite(gradients[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(*gradients)
    named = (jax.tree_util.tree_leaves_with_path(tree) for tree in gradients)
    for (path, got), (_, want) in zip(*named):
        error = np.linalg.norm(np.asarray(got - want)) / np.linalg.norm(want)
        print(f"{jax.tree_util.keystr(path):24} off by {error:.1%} of its norm")
        chex.assert_scalar_in(float(error), 0, FP8_ERROR)


if __name__ == "__main__":
    main()
