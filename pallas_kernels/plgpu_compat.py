"""The one module that names `jax.experimental.pallas.mosaic_gpu`, whose interface may change with any release of JAX.

With it, what every kernel's api asks: where it runs, and which backend that means.
"""

from __future__ import annotations

import functools
import warnings
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

Backend = Literal["auto", "pallas", "reference"]
HOPPER = "9.0"  # the compute capability whose tensor cores and copy engine the kernels use
SMS = 132  # streaming multiprocessors of an H100 SXM or H200: what is lowered for where there is no GPU to ask
WGMMA, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
# Runs a kernel on a CPU: threads, barriers, copies and clusters are simulated, and it says where two of them race.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def swizzled(dtype: jnp.dtype) -> tuple:
    """The shared-memory layout that tensor cores and copy engine want: tiles of 8 rows of 128 swizzled bytes."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def spread(vector: Array, shape: tuple[int, int], axis: int) -> Array:
    """A register vector along `axis` of a register matrix."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def pad_to(x: Array, rows: int, columns: int) -> Array:
    """x [M, N] with zeros up to multiples of `rows` and `columns`; x itself where it has them."""
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    return jnp.pad(x, [(0, missing[0]), (0, missing[1])]) if any(missing) else x


def multiprocessors() -> int:
    """Of the GPU here; SMS where there is none."""
    device = jax.devices()[0]
    return getattr(device, "core_count", SMS) if device.platform == "gpu" else SMS


def use_kernel(backend: Backend) -> bool:
    """Whether `backend` means the Hopper kernels: "pallas" does, "reference" does not, "auto" on a Hopper GPU.

    On another GPU "auto" warns once and "pallas" is a RuntimeError. On a CPU "pallas" traces, so that it can be lowered for CUDA.
    """
    if backend not in ("auto", "pallas", "reference"):
        raise ValueError(f'backend = {backend!r}: one of "auto", "pallas", "reference"')
    other = _other_gpu()
    if backend == "pallas" and other:
        raise RuntimeError(f'backend = "pallas" needs a Hopper GPU (capability {HOPPER}), this is {other}: use "auto"')
    if backend == "auto" and other:
        _warn_once(other)
    return backend == "pallas" or (backend == "auto" and not other and jax.devices()[0].platform == "gpu")


def _other_gpu() -> str | None:
    """Name and capability of a GPU here that is no Hopper."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "unknown"))
    return f"{device.device_kind} ({capability})" if device.platform == "gpu" and capability != HOPPER else None


@functools.cache
def _warn_once(gpu: str) -> None:
    warnings.warn(
        f"{gpu} is no Hopper GPU (compute capability {HOPPER}): kernels give way to references", RuntimeWarning, stacklevel=3
    )
