"""Several tensor-core products of a warpgroup in flight together."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.plgpu_compat import ACC, WGMMA, Ref, plgpu

F32 = jnp.float32


def multiply(simulated: bool, body, *of: tuple[Array | None, Array | Ref, Ref]):
    """Issue acc + a b for every (acc, a, b), one after the other; a is in registers or shared memory, b in
    shared memory, and an acc of None is 0.

    Calls body(take) and returns its result. Each take() waits for the next product while those behind it are
    still computed.
    """
    if simulated:  # the simulator supports neither an initial accumulator nor operands in registers
        made = iter([(0.0 if acc is None else acc) + dot(a[...], b[...]) for acc, a, b in of])
        # Loads replace the reads of the tensor cores. Unlike those, they need a fence before a copy
        # overwrites the memory.
        plgpu.commit_smem()
        return body(lambda: plgpu.layout_cast(next(made), WGMMA))

    def run(*refs):
        for ref, (acc, _, _) in zip(refs, of):
            if acc is not None:
                ref[...] = acc
        # Operands in registers must be ready before the first product is issued, or ptxas serialises the
        # products (C7513).
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
    """The float32 product that the simulator computes instead of a tensor-core product."""
    return jnp.dot(a.astype(F32), b.astype(F32), precision=lax.Precision.HIGHEST)
