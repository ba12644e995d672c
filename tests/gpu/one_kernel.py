"""One kernel, once, on small operands, to be watched by compute-sanitizer (`python -P`, so that nothing beside it is imported):

    compute-sanitizer --tool racecheck --kernel-regex kns=mosaic python -P tests/gpu/one_kernel.py NAME

Without NAME: prints the names.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import api as attention
from pallas_kernels.blockwise_matmul import api as dense
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.logprob import api as logprob
from pallas_kernels.quantize import reference as q


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def product(m: int, n: int = 512, k: int = 512) -> jax.Array:
    return dense.blockwise_matmul(*q.quantize_rows(normal(m, k)), *q.quantize_blocks(normal(n, k)), backend="pallas")


def wgrad() -> jax.Array:
    return dense.wgrad(*q.quantize_rows(normal(512, 512)), *q.quantize_rows(normal(384, 512)), backend="pallas")


def groups_of(rows: int) -> grouped.Groups:
    return grouped.plan_groups(jnp.asarray([rows - 130, 0, 130], jnp.int32), rows)


def grouped_product() -> jax.Array:
    groups = groups_of(400)
    x = grouped.pad_rows(normal(400, 384), groups)
    return grouped.grouped_matmul(*q.quantize_rows(x), *q.quantize_blocks(normal(3, 512, 384)), groups, backend="pallas")


def grouped_wgrad() -> jax.Array:
    groups = groups_of(400)
    dy, x = (q.quantize_tokens(grouped.pad_rows(normal(400, n), groups)) for n in (512, 384))
    return grouped.grouped_wgrad(*dy, *x, groups, backend="pallas")


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    ids = jnp.asarray(np.repeat([1, 2, 0], [300, 180, 32])[None], jnp.int32)
    return attention.attention(q, k, v, attention.tables_of(ids), backend="pallas").astype(jnp.float32).sum()


def of_words(x: jax.Array, w: jax.Array) -> jax.Array:
    logp, entropy = logprob.linear_logprob(x, w, jnp.arange(len(x), dtype=jnp.int32), backend="pallas")
    return (logp + entropy).sum()


HEADS = normal(1, 512, 4, 128), normal(1, 512, 2, 128), normal(1, 512, 2, 128)
KERNELS = {
    "product of 16 rows": lambda: product(16), "product of 64 rows": lambda: product(64), "product": lambda: product(512),
    "wgrad": wgrad, "grouped product": grouped_product, "grouped wgrad": grouped_wgrad,
    "attention": lambda: jax.jit(attend)(*HEADS), "attention's gradients": lambda: jax.jit(jax.grad(attend, (0, 1, 2)))(*HEADS),
    "log-probabilities": lambda: jax.jit(jax.grad(of_words, (0, 1)))(normal(512, 256), normal(1024, 256)),
}  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("\n".join(KERNELS))
    jax.block_until_ready(KERNELS[sys.argv[1]]())
    print(sys.argv[1], "ran")
