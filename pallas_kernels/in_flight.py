"""Several tensor-core products of a warpgroup in flight together."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import ACC, WGMMA, Ref, plgpu

F32 = jnp.float32


def multiply(simulated: bool, body, *of: tuple[Array | None, Array | Ref, Ref]):
    """Issue acc + a b for every (acc, a, b), one after the other, with a in registers or shared memory and b
    in the latter.

    acc None is 0. -> body(take), whose every take() waits for the next result while those behind it are still
    computed.
    """
    if simulated:  # the simulator has no accumulator that begins with a value, and no operand in registers
        made = iter([(0.0 if acc is None else acc) + dot(a[...], b[...]) for acc, a, b in of])
        # loads stand where tensor cores read, and unlike theirs want a fence before a copy writes there
        plgpu.commit_smem()
        return body(lambda: plgpu.layout_cast(next(made), WGMMA))

    def run(*refs):
        for ref, (acc, _, _) in zip(refs, of):
            if acc is not None:
                ref[...] = acc
        # What is in registers has to be there before the first is issued, or ptxas makes them wait for each
        # other (C7513).
        lefts = [lax.optimization_barrier(a) if isinstance(a, Array) else a for _, a, _ in of]
        for ref, a, (_, _, b) in zip(refs, lefts, of):
            plgpu.wgmma(ref, a, b)
        order = iter(enumerate(refs, 1))

        def take() -> Array:
            done, ref = next(order)
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(ref, wait_n=len(refs) - done))

        return body(take)

    return pl.run_scoped(run, *(ACC((a.shape[0], b.shape[1]), F32) for _, a, b in of))


def dot(a: Array, b: Array) -> Array:
    """The float32 product that the simulator computes in place of a tensor-core product."""
    return jnp.dot(a.astype(F32), b.astype(F32), precision=lax.Precision.HIGHEST)
