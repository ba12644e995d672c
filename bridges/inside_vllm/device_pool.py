"""JAX's memory on a GPU that it shares with an engine.

JAX's default allocator takes large regions from the driver and never returns them. After an update an engine
then has no memory to wake, however little JAX still uses. With `cuda_async`, JAX allocates from the driver's
own memory pool of the device. `hold` makes the pool keep freed memory for the programs of a step and the
parts of a publish, and `give_back` returns all unused memory to the driver. Both do nothing under another
allocator.
"""

from __future__ import annotations

import ctypes
import os

ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # JAX would take three quarters of the GPU at its first array
    ALLOCATOR: "cuda_async",
}
RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
EVERYTHING = 2**64 - 1
LEAVE_MORE = ("leave it more memory by a smaller cache (rollout.kv_cache_gib), fewer rows at once "
              # the next step of who has none
              "(train.rows_per_microbatch) or train.remat = 'layer', then resume")


def share() -> None:
    """Choose the allocator, unless the environment already does. Call it before JAX creates its first
    array."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def hold() -> None:
    """Keep freed memory in the pools, where only JAX can use it, until `give_back`. Raises RuntimeError if
    the driver fails."""
    for pool in _pools():
        kept = ctypes.c_uint64(EVERYTHING)
        _check(_driver().cuMemPoolSetAttribute(pool, RELEASE_THRESHOLD, ctypes.byref(kept)))


def give_back() -> None:
    """Return the memory that no JAX array uses to the driver. Raises RuntimeError if the driver fails."""
    for pool in _pools():
        _check(_driver().cuMemPoolTrimTo(pool, ctypes.c_size_t(0)))


def total() -> int | None:
    """The memory of JAX's first GPU, in bytes; None without a GPU."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    handle, size = ctypes.c_int(), ctypes.c_size_t()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device.local_hardware_id))
    _check(_driver().cuDeviceTotalMem_v2(ctypes.byref(size), handle))
    return size.value


def in_use() -> int | None:
    """The memory in use on JAX's first GPU, in bytes, whoever holds it; None without a GPU."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    handle, context, before = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    free, size = ctypes.c_size_t(), ctypes.c_size_t()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device.local_hardware_id))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))  # JAX's own
    _check(_driver().cuCtxPushCurrent_v2(context))
    try:
        _check(_driver().cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(size)))
    finally:
        _check(_driver().cuCtxPopCurrent_v2(ctypes.byref(before)))
        _check(_driver().cuDevicePrimaryCtxRelease_v2(handle))
    return size.value - free.value


def _pools() -> list[ctypes.c_void_p]:
    """The memory pools of JAX's GPUs in this process; none under another allocator."""
    if os.environ.get(ALLOCATOR) != "cuda_async":
        return []
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:  # the learner uses PyTorch, and there is no JAX memory
        return []

    found = []
    for device in jax.local_devices():
        if device.platform != "gpu":
            continue
        # wait for all earlier programs, so that the memory that they free is in the pool
        jnp.negative(jax.device_put(0, device)).block_until_ready()
        handle, pool = ctypes.c_int(), ctypes.c_void_p()
        _check(_driver().cuDeviceGet(ctypes.byref(handle), device.local_hardware_id))
        _check(_driver().cuDeviceGetDefaultMemPool(ctypes.byref(pool), handle))
        found.append(pool)
    return found


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver refused a call on JAX's memory pool: error {result}")
