"""The one module that names `jax.experimental.pallas.mosaic_gpu`, whose interface may change with any release
of JAX.

It also answers two questions of every kernel's api: where it runs, and which backend that means.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

Backend = Literal["auto", "pallas", "reference"]
HOPPER = "9.0"  # the compute capability whose tensor cores and copy engine the kernels use
# What is lowered for where there is no GPU to ask:
SMS = 132  # streaming multiprocessors, of an H100 SXM or H200; an H100 PCIe has 114, an H20 78
L2 = 50 * 2**20  # bytes of the cache that they share, an H100's; an H200 has 60 MiB
WGMMA, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  # public, but not in JAX's list of exports
# A place in memory, a view of one, or a barrier, inside a kernel; and, among scratch types, the declaration
# that it is made from. JAX has no public type for them together.
Ref = Any
Index = Array | int  # of a stage or a step: an int where it is known when the kernel is traced
# Runs a kernel on a CPU: threads, barriers, copies and clusters are simulated, and it says where two of them
# race.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def swizzled(dtype: jnp.dtype, columns: int | None = None) -> tuple[Any, Any]:
    """The layout in shared memory that tensor cores and copy engine want: tiles of 8 rows of so many columns,
    by default as many as make 128 bytes, whose bytes are swizzled."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = columns or 128 // itemsize
    # JAX leaves methods of these abstract that only its own lowering would call.
    return (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(columns * itemsize),  # pyright: ignore[reportAbstractUsage]
    )


def spread(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A register vector along `axis` of a register matrix."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def pad_to(x: Array, rows: int, columns: int) -> Array:
    """x [M, N] with zeros up to multiples of `rows` and `columns`; x itself where it has them."""
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    return jnp.pad(x, [(0, missing[0]), (0, missing[1])]) if any(missing) else x


def device() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]  # a class, which JAX assigns
    """Where what is computed, or traced, here will run: in a `shard_map`, or with a mesh set, on a device of
    the mesh; else on `jax.default_device`, or on the first device of this process."""
    mesh, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if mesh is not None:
        return next(d for d in jax.local_devices(backend=mesh.platform) if d.device_kind == mesh.device_kind)
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def multiprocessors() -> int:
    """How many the GPU here has; SMS if there is none."""
    here = device()
    return getattr(here, "core_count", SMS) if here.platform == "gpu" else SMS


def cache_bytes() -> int:
    """The bytes of cache that all multiprocessors of the GPU here share; L2 if there is no GPU, or if it does not
    say."""
    here = device()
    return _cache_bytes(here.local_hardware_id) if here.platform == "gpu" else L2


@functools.cache
def _cache_bytes(number: int) -> int:
    """JAX does not tell, but the driver does, which JAX has loaded and initialised."""
    size, attribute = ctypes.c_int(0), 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(size), attribute, number)
    except OSError:
        return L2
    return L2 if failed else size.value or L2


def use_kernel(backend: Backend) -> bool:
    """Whether `backend` means the Hopper kernels: "pallas" does, "reference" does not, "auto" on a Hopper
    GPU.

    On another GPU "auto" warns once and "pallas" is a RuntimeError. On a CPU "pallas" traces, so that it can
    be lowered for CUDA.
    """
    if backend not in ("auto", "pallas", "reference"):
        raise ValueError(f'backend = {backend!r}: one of "auto", "pallas", "reference"')
    here = device()
    capability = str(getattr(here, "compute_capability", "unknown"))
    other = f"{here.device_kind} ({capability})" if here.platform == "gpu" and capability != HOPPER else ""
    if backend == "pallas" and other:
        raise RuntimeError(
            f'backend = "pallas" needs a Hopper GPU (capability {HOPPER}), this is {other}: use "auto"')
    if backend == "auto" and other:
        _warn_once(other)
    return backend == "pallas" or (backend == "auto" and not other and here.platform == "gpu")


@functools.cache
def _warn_once(gpu: str) -> None:
    warnings.warn(
        f"{gpu} is no Hopper GPU (compute capability {HOPPER}): kernels give way to references",
        RuntimeWarning, stacklevel=3
    )
