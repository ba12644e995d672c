"""Drawing from a softmax over a vocabulary without its logits: by parts of PART words, by the Hopper kernels
or in plain jnp.

`statistics` gives the maximum and the sum of exponentials of each part: a part is drawn from those. `logits`
then computes the words of each row's part once more, bit for bit: a word is drawn from those. `logprob` joins
the statistics. All three give a row the same bits beside whatever rows, so that a learner that calls them
(`logprobs`) finds an engine's log-probabilities.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.few_rows import sm90 as few_rows
from pallas_kernels.forward_only import forward_only
from pallas_kernels.logprob import reference, sm90
from pallas_kernels.logprob.softcap import soft_cap
from pallas_kernels.plgpu_compat import (
    ACC,
    ROW,
    WGMMA,
    Backend,
    Ref,
    plgpu,
    spread,
    store,
    swizzled,
    use_kernel,
)
from pallas_kernels.rows import by_rows

PART = 256
F32, ROWS, DEPTH = jnp.float32, sm90.ROWS, sm90.DEPTH
STAGES = 4
TILES = sm90.Tiles(n=PART, stages=STAGES, cluster="")
NOWHERE = -jnp.inf
no_derivative = forward_only("differentiate pallas_kernels.logprob.api.linear_logprob")
BLOCK = 2048  # rows of `logprobs` whose statistics are in memory at a time


def why_reference(x_dtype: jnp.dtype, width: int, words: int) -> str:
    """Why the kernels do not take x [M, width] and w [words, width] on any GPU; "" if they do."""
    if jnp.dtype(x_dtype) not in (jnp.bfloat16, jnp.float16):
        return "takes bfloat16 or float16"
    return "" if width % DEPTH == words % DEPTH == 0 else f"takes widths and words in multiples of {DEPTH}"


@no_derivative
def statistics(x: Array, w: Array, inverse_temperature: Array, targets: Array | None = None, *,
               softcap: float | None = None, backend: Backend = "auto", interpret=None) -> tuple[Array, ...]:
    """x [M, K], w [N, K], inverse_temperature [M] float32 -> of z = x w^T, capped unless `softcap` is None,
    times inverse_temperature: (max z, sum exp(z - max)) of each part, both [ceil(N / PART), M] float32. With
    targets [M] int32 also the logit of each row's target, capped, as `logits` gives it, [M] float32.

    The kernel takes bfloat16 or float16, and K and N of multiples of 64. Raises ValueError for others with
    "pallas".
    """
    if not _use_kernel(backend, x, w):
        def rows(x: Array, inverse: Array, targets: Array | None) -> tuple[Array, ...]:
            z = _capped(reference.logits(x, w), softcap)
            of_target = () if targets is None else (jnp.take_along_axis(z, targets[:, None], 1)[:, 0],)
            z = _padded(lax.optimization_barrier(z) * inverse[:, None])
            highest = jnp.max(z, 2)
            return highest, jnp.sum(jnp.exp(z - highest[..., None]), 2), *of_target

        highest, total, *of_target = by_rows(rows, x, inverse_temperature, targets)
        return highest.T, total.T, *of_target
    m, missing = len(x), -len(x) % TILES.m
    vectors = [inverse_temperature] if targets is None else [inverse_temperature, targets]
    x, *vectors = (jnp.pad(a, ((0, missing), *((0, 0),) * (a.ndim - 1))) for a in (x, *vectors))
    plan, count = sm90._plan(x, w, 1.0, F32, TILES, interpret, softcap), len(vectors) + 1
    out = jax.ShapeDtypeStruct((plan.grid[1] * count, len(x)), F32)
    buffer = plgpu.SMEM((sm90.CONSUMERS, count, ROWS), F32)
    found = sm90._call(plan, _Statistics, x, w, tuple(vectors), out, buffer, interpret)
    found = found.reshape(plan.grid[1], count, -1)[:, :, :m]
    of_target = () if targets is None else (jnp.take_along_axis(found[:, 2], targets[None] // PART, 0)[0],)
    return found[:, 0], found[:, 1], *of_target


class _Statistics(sm90._Epilogue):
    def __init__(self, plan: sm90.Plan, vectors, out, buffer, row: Array, ni: Array):
        self.plan, self.out, self.buffer, self.row, self.ni = plan, out, buffer, row, ni
        self.factor, *targets = (plgpu.load(v.at[pl.ds(row, ROWS)], layout=ROW, optimized=False)
                                 for v in vectors)
        self.targets = targets[0] if targets else None

    def __call__(self, z: Array) -> None:
        n, width = self.plan.n, self.plan.tiles.n
        z = self.logits(z)[0]
        of_target = () if self.targets is None else (jnp.sum(jnp.where(self.is_target(), z, 0.0), axis=1),)
        # without the barrier the product is rounded, or fused with what follows, as suits the number of rows
        z = lax.optimization_barrier(z * spread(self.factor, z.shape, 0))
        if n % width:
            z = jnp.where(self.columns() < n - self.ni * width, z, sm90.NEVER)
        highest = jnp.max(z, axis=1)
        total = jnp.sum(jnp.exp2((z - spread(highest, z.shape, 0)) * sm90.LOG2_E), axis=1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        found = highest, total, *of_target
        for i, x in enumerate(found):
            self.buffer[i] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(
            self.buffer, self.out.at[pl.ds(self.ni * len(found), len(found)), pl.ds(self.row, ROWS)])


@no_derivative
def logprob(z: Array, highest: Array, total: Array, backend: Backend = "auto", interpret=None) -> Array:
    """The log-probabilities [M] of words with logits z [M], already times inverse_temperature, by the
    `statistics` of the parts [P, M]. The order of sums depends on P alone."""
    z, highest, total = lax.optimization_barrier((z, highest.T, total.T))
    if use_kernel(backend):
        return _joined(z, jnp.max(highest, 1), _sums(highest, total, interpret))

    def rows(z: Array, highest: Array, total: Array) -> Array:
        top = jnp.max(highest, 1)
        # products that XLA fused with the sum would be rounded with it, or not, as suits the program
        return _joined(z, top, lax.optimization_barrier(total * jnp.exp(highest - top[:, None])))

    return by_rows(rows, z, highest, total)


def _joined(z: Array, top: Array, terms: Array) -> Array:
    """z - top - log(the sum of terms [M, P] over P, in halves), [M]. The logarithm stands alone, so that XLA
    always compiles the same."""
    parts = 1 << (terms.shape[1] - 1).bit_length()
    terms = jnp.pad(terms, ((0, 0), (0, parts - terms.shape[1])))
    while parts > 1:
        parts //= 2
        terms = terms[:, :parts] + terms[:, parts:]
    return z - top - lax.optimization_barrier(jnp.log(lax.optimization_barrier(terms[:, 0])))


def _sums(highest: Array, total: Array, interpret) -> Array:
    """The sums of total * exp(highest - the row's maximum) of [M, P], over each 128 of P: [M, P / 128,
    rounded up]. A warpgroup computes a row. XLA gives no promise to compile the exponential and its sum alike
    in every program."""
    def kernel(highest, total, out):
        row = lax.axis_index("row")
        highest, total = few_rows.read(highest.at[row]), few_rows.read(total.at[row])
        below = highest - jnp.max(jnp.max(highest, axis=1))
        store(out.at[row], jnp.sum(total * jnp.exp2(below * sm90.LOG2_E), axis=1))

    missing = -highest.shape[1] % (few_rows.WARPS * few_rows.BLOCK)
    grouped = [few_rows.grouped(jnp.pad(x, ((0, 0), (0, missing)), constant_values=nothing))
               for x, nothing in ((highest, sm90.NEVER), (total, 0))]
    out = jax.ShapeDtypeStruct(grouped[0].shape[:2], F32)
    return few_rows.call("sums_of_parts", kernel, (len(highest),), out, interpret)(*grouped)


@no_derivative
def logprobs(x: Array, w: Array, targets: Array, inverse_temperature: Array, *, softcap: float | None = None,
             backend: Backend = "auto", interpret=None) -> Array:
    """log p of targets [M] int32 under the softmax of x w^T times inverse_temperature [M], x [M, K], w [N,
    K]: [M] float32, BLOCK rows at a time."""
    def block(x: Array, targets: Array, inverse: Array) -> Array:
        highest, total, z = statistics(x, w, inverse, targets, softcap=softcap, backend=backend,
                                       interpret=interpret)
        return logprob(lax.optimization_barrier(z) * inverse, highest, total, backend, interpret)

    m, blocks = len(x), pl.cdiv(len(x), BLOCK)
    if blocks == 1:
        return block(x, targets, inverse_temperature)
    cut = lambda a: jnp.pad(a, ((0, blocks * BLOCK - m),
                                *((0, 0),) * (a.ndim - 1))).reshape(blocks, BLOCK, *a.shape[1:])
    return lax.map(lambda operands: block(*operands),
                   (cut(x), cut(targets), cut(inverse_temperature))).reshape(-1)[:m]


@no_derivative
def logits(x: Array, w: Array, part: Array, *, softcap: float | None = None, backend: Backend = "auto",
           interpret=None) -> Array:
    """x [M, K], w [N, K], part [M] int32 -> [M, PART] float32: each row's logits of the words of its part,
    capped as in `statistics`, -inf for what is no word."""
    words = part[:, None] * PART + jnp.arange(PART)
    if _use_kernel(backend, x, w):
        z = _of_parts(x, w, part, interpret)
    else:
        z = by_rows(lambda x, words: jnp.take_along_axis(reference.logits(x, w), words, 1), x,
                    jnp.minimum(words, len(w) - 1))
    return jnp.where(words < len(w), _capped(z, softcap), NOWHERE)


def _capped(z: Array, softcap: float | None) -> Array:
    return z if softcap is None else soft_cap(z, softcap, lambda z: z)[0]


def _padded(z: Array) -> Array:
    """[M, N] -> [M, parts, PART]."""
    return jnp.pad(z, ((0, 0), (0, -z.shape[1] % PART)), constant_values=sm90.NEVER).reshape(len(z), -1, PART)


def _use_kernel(backend: Backend, x: Array, w: Array) -> bool:
    why = why_reference(x.dtype, x.shape[1], len(w))
    if backend == "pallas" and why:
        raise ValueError(f'backend = "pallas" {why}; x is {x.dtype}{list(x.shape)}, w '
                         f'{list(w.shape)}: use "auto"')
    return use_kernel(backend) and not why


def _of_parts(x: Array, w: Array, part: Array, interpret) -> Array:
    """A warpgroup computes the 64 rows around its own, by the tensor cores in the order of `statistics`, and
    keeps its own. It copies ahead for itself: a stage is free once the product after it has begun and it is
    done."""
    m, blocks = len(x), pl.cdiv(x.shape[1], DEPTH)
    stages = min(STAGES, blocks)

    def kernel(x, w, part, out, xs: Ref, ws: Ref, full: Ref):
        row = lax.axis_index("row")
        rows, words = pl.ds(lax.div(row, jnp.int32(ROWS)) * ROWS, ROWS), pl.ds(part[row] * PART, PART)

        def copy(ki):
            slot, ks = lax.rem(jnp.int32(ki), jnp.int32(stages)), pl.ds(ki * DEPTH, DEPTH)
            plgpu.copy_gmem_to_smem(x.at[rows, ks], xs.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(w.at[words, ks], ws.at[slot], full.at[slot])

        def product(z):
            @pl.loop(0, blocks)
            def _(ki):
                slot = lax.rem(ki, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(z, xs.at[slot], ws.at[slot].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                pl.when((ki >= 1) & (ki - 1 + stages < blocks))(lambda: copy(ki - 1 + stages))

            plgpu.wgmma_wait(0)
            return z[...]

        for ki in range(stages):
            copy(jnp.int32(ki))
        z = pl.run_scoped(product, ACC((ROWS, PART), F32))
        mine = plgpu.broadcasted_iota(jnp.int32, z.shape, 0, layout=WGMMA) == lax.rem(row, jnp.int32(ROWS))
        store(out.at[row], jnp.sum(jnp.where(mine, z, 0.0), axis=0))

    scratch = (plgpu.SMEM((stages, ROWS, DEPTH), x.dtype, transforms=swizzled(x.dtype)),
               plgpu.SMEM((stages, PART, DEPTH), w.dtype, transforms=swizzled(w.dtype)),
               plgpu.Barrier(num_arrivals=2, num_barriers=stages))
    x = jnp.pad(x, ((0, -m % ROWS), (0, 0)))
    return plgpu.kernel(kernel, kernel_name="logits_of_parts", out_type=jax.ShapeDtypeStruct((m, PART), F32),
                        grid=(m,),
                        grid_names=("row",),
                        num_threads=1, thread_name="wg", scratch_types=scratch, interpret=interpret,
                        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=4096))(x, w, part)
