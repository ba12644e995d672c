"""Runs one kernel once on small operands under compute-sanitizer (with `python -P`, so that no neighbouring
file is imported):

    compute-sanitizer --tool racecheck --racecheck-report all --kernel-name kns=mosaic python -P
    tests/gpu/one_kernel.py NAME

Without NAME it prints the names. `test_races.py` runs all of them.
"""

from __future__ import annotations

import os
import sys

# XLA's autotuning of its own kernels triggers errors of the sanitizer
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.attention import api as attention
from pallas_kernels.blockwise_matmul import api as dense
from pallas_kernels.blockwise_matmul.sm90 import Consumer
from pallas_kernels.blockwise_matmul.tiles import CANDIDATES, FOR_WGRAD, Tiles
from pallas_kernels.fused_quantize import api as fused
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.logprob import api as logprob
from pallas_kernels.plgpu_compat import plgpu
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference as q


def normal(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), dtype)


def product(m: int, tiles: str | None = None, n: int = 512, k: int = 512) -> jax.Array:
    operands = *q.quantize_rows(normal(m, k)), *q.quantize_blocks(normal(n, k))
    return dense.blockwise_matmul(*operands, backend="pallas", tiles=CANDIDATES[tiles] if tiles else None)


def wgrad(tiles: str | Tiles) -> jax.Array:
    operands = *q.quantize_rows(normal(512, 512)), *q.quantize_rows(normal(384, 512))
    return dense.wgrad(*operands, backend="pallas",
                       tiles=FOR_WGRAD[tiles] if isinstance(tiles, str) else tiles)


def groups_of(rows: int) -> grouped.Groups:
    return grouped.plan_groups(jnp.asarray([rows - 130, 0, 130], jnp.int32), rows)


def grouped_product() -> jax.Array:
    groups = groups_of(400)
    x = grouped.pad_rows(normal(400, 384), groups)
    return grouped.grouped_matmul(*q.quantize_rows(x), *q.quantize_blocks(normal(3, 512, 384)), groups,
                                  backend="pallas")


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


def race() -> jax.Array:
    """A race that racecheck must find: one warpgroup reads memory that another writes, without waiting for
    it."""

    def kernel(out, shared):
        wg = jax.lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            shared[...] = plgpu.layout_cast(jnp.ones(128, jnp.float32), plgpu.Layout.WG_STRIDED((128,), 1))

        @pl.when(wg == 1)
        def _():
            out[...] = plgpu.load(shared, layout=plgpu.Layout.WG_STRIDED((128,), 1))

    return plgpu.kernel(
        kernel, out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[plgpu.SMEM((128,), jnp.float32)],
        num_threads=2, thread_name="wg", compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )()


def freed_early() -> jax.Array:
    """The same race in the style of these kernels, with copies that signal barriers: a stage is freed before
    it is read."""
    arrived, release = Consumer.arrived, Consumer.release
    Consumer.arrived = lambda self, i: (arrived(self, i), release(self, i))[0]
    Consumer.release = lambda self, i: None
    return wgrad(Tiles(2, stages=2))


HEADS = normal(1, 512, 4, 128), normal(1, 512, 2, 128), normal(1, 512, 2, 128)
KERNELS = {
    "quantiser of rows and tokens": lambda: quantize.quantize_both(normal(512, 384), backend="pallas"),
    "quantiser of blocks": lambda: quantize.quantize_blocks(normal(512, 384), transposed=True,
                                                            backend="pallas"),
    "RMSNorm": lambda: fused.rms_norm_quantize(normal(512, 384), normal(384), 1e-6, tokens=True,
                                               backend="pallas"),
    "SwiGLU": lambda: fused.swiglu_quantize(normal(512, 768), tokens=True, keep=True, backend="pallas"),
    "SwiGLU's gradient": lambda: fused.swiglu_grad_quantize(normal(512, 384), normal(512, 768),
                                                            backend="pallas"),
    "product of one row": lambda: product(1), "product of 16 rows": lambda: product(16),
    "product of 64 rows": lambda: product(64), "product": lambda: product(512),
    "product in pairs": lambda: product(512, "3x1x128 pairs along N"),
    "product of twice 64 rows": lambda: product(512, "2x1x128, twice 64 rows"),
    "product of twice 64 rows in pairs": lambda: product(512, "2x1x128, twice 64 rows, pairs along N"),
    "wgrad": lambda: wgrad("3x1x128"), "wgrad, 2 in flight": lambda: wgrad("2x1x128, 2 in flight"),
    "wgrad of twice 64 rows": lambda: wgrad("2x1x128, twice 64 rows"),
    "grouped product": grouped_product, "grouped wgrad": grouped_wgrad,
    "attention": lambda: jax.jit(attend)(*HEADS),
    "attention's gradients": lambda: jax.jit(jax.grad(attend, (0, 1, 2)))(*HEADS),
    "log-probabilities": lambda: jax.jit(jax.grad(of_words, (0, 1)))(normal(512, 256), normal(1024, 256)),
    "a race": race, "a stage freed early": freed_early,
}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(*KERNELS, sep="\n")
        sys.exit()
    jax.block_until_ready(KERNELS[sys.argv[1]]())
    print(sys.argv[1], "ran")
