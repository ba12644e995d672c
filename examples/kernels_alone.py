"""The kernels without a model: quantise, multiply, attend. Needs jax; on a CPU the references compute it."""

import jax
import jax.numpy as jnp

from pallas_kernels import blockwise_matmul, packed_attention, quantize_blocks, quantize_rows

keys = jax.random.split(jax.random.key(0), 5)
x, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, [(256, 512), (384, 512)]))
codes, scales = quantize_rows(x)  # E4M3 [256, 512], float32 [256, 4]: one scale for 128 numbers of a row
y = blockwise_matmul(codes, scales, *quantize_blocks(w))  # x w^T [256, 384] bfloat16
exact = jnp.dot(x, w.T, preferred_element_type=jnp.float32)
error = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
print(f"product: {y.shape} {y.dtype}, off by {error:.1%} of its norm")

q, k, v = (jax.random.normal(key, (256, heads, 64), jnp.bfloat16) for key, heads in zip(keys[2:], (8, 2, 2)))
segments = jnp.repeat(jnp.array([1, 2, 0]), jnp.array([150, 100, 6]), total_repeat_length=256)  # 0 is padding
o = packed_attention(q, k, v, segments)
alone = packed_attention(q[150:250], k[150:250], v[150:250], jnp.ones(100, jnp.int32))
same = bool(jnp.allclose(o[150:250], alone, atol=0.01))
print(f"attention: {o.shape}, the second sequence alone gives the same: {same}")
