"""The only module that imports `jax.experimental.pallas.mosaic_gpu`, whose interface may change in any
release of JAX.

It also tells each kernel's api which device a program runs on, and which backend that means.
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
# The assumed GPU if there is none to ask:
SMS = 132  # streaming multiprocessors of an H100 SXM or H200; an H100 PCIe has 114, an H20 78
L2 = 50 * 2**20  # bytes of an H100's L2 cache; an H200 has 60 MiB
WGMMA, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]  # public, but not in JAX's list of exports
# A memory reference, a view of one, or a barrier inside a kernel; among scratch types, its declaration. JAX
# has no public type for all of them.
Ref = Any
Index = Array | int  # the index of a stage or a step; an int if it is known at trace time
# Runs a kernel on a CPU: simulates threads, barriers, copies and clusters, and reports races.
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def swizzled(dtype: jnp.dtype, columns: int | None = None) -> tuple[Any, Any]:
    """The shared memory layout that tensor cores and copy engine need: swizzled tiles of 8 rows by `columns`,
    by default as many as make 128 bytes."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = columns or 128 // itemsize
    # JAX leaves methods of these abstract that only its own lowering calls.
    return (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(columns * itemsize),  # pyright: ignore[reportAbstractUsage]
    )


def spread(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Broadcast a register vector along `axis` to a register matrix."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def store(ref: Ref, value: Array) -> None:
    """Write `value` from registers to global memory, also where its layout fills no whole sectors of 32
    bytes, which JAX 0.12 refuses unless it is told. JAX 0.11 has no such option."""
    if (told := getattr(plgpu, "store", None)) is not None:
        told(ref, value, optimized=False)
    else:
        ref[...] = value


def pad_to(x: Array, rows: int, columns: int) -> Array:
    """x [M, N] padded with zeros to multiples of `rows` and `columns`; x itself if it needs none."""
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    return jnp.pad(x, [(0, missing[0]), (0, missing[1])]) if any(missing) else x


def device() -> jax.Device:  # pyright: ignore[reportInvalidTypeForm]  # a class, which JAX assigns
    """The device on which traced or computed code will run: inside a `shard_map`, or with a mesh set, a
    device of the mesh; otherwise `jax.default_device`, or the first device of this process."""
    mesh, default = jax.sharding.get_abstract_mesh().abstract_device, jax.config.jax_default_device
    if mesh is not None:
        return next(d for d in jax.local_devices(backend=mesh.platform) if d.device_kind == mesh.device_kind)
    return default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]


def multiprocessors() -> int:
    """The number of streaming multiprocessors of this GPU; SMS if there is no GPU."""
    here = device()
    return getattr(here, "core_count", SMS) if here.platform == "gpu" else SMS


def cache_bytes() -> int:
    """The bytes of this GPU's L2 cache; L2 if there is no GPU, or if it does not report the size."""
    here = device()
    return _cache_bytes(here.local_hardware_id) if here.platform == "gpu" else L2


@functools.cache
def _cache_bytes(number: int) -> int:
    """The size from the CUDA driver, which JAX has loaded and initialised; JAX itself does not report it."""
    size, attribute = ctypes.c_int(0), 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(size), attribute, number)
    except OSError:
        return L2
    return L2 if failed else size.value or L2


def use_kernel(backend: Backend) -> bool:
    """Whether `backend` means the Hopper kernels: "pallas" does, "reference" does not, "auto" does on a
    Hopper GPU.

    On another GPU "auto" warns once and "pallas" raises a RuntimeError. On a CPU "pallas" traces the kernel,
    so that it can be lowered for CUDA.
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
        f"{gpu} is not a Hopper GPU (compute capability {HOPPER}): using references instead of kernels",
        RuntimeWarning, stacklevel=3
    )
