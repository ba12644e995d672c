"""JAX's memory on a GPU that it shares with an engine.

JAX's usual allocator takes regions from the driver, larger than what is asked for, and never gives one back:
after an update an engine has no room to wake, however little JAX still holds. With `cuda_async` JAX allocates
from the driver's own pool of the device: `hold` has the pool keep what is freed, so that a step's programs
and the parts of a publish find it there, and `give_back` returns to the driver all that no array needs. Both
do nothing where JAX allocates otherwise.
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


def share() -> None:
    """Choose the allocator, where the environment does not say otherwise. Before JAX makes its first array,
    or it is too late."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def hold() -> None:
    """Keep freed memory in the pools, for JAX alone, until `give_back`. Raises RuntimeError from the
    driver."""
    for pool in _pools():
        kept = ctypes.c_uint64(EVERYTHING)
        _check(_driver().cuMemPoolSetAttribute(pool, RELEASE_THRESHOLD, ctypes.byref(kept)))


def give_back() -> None:
    """Return to the driver what JAX's arrays do not need. Raises RuntimeError from the driver."""
    for pool in _pools():
        _check(_driver().cuMemPoolTrimTo(pool, ctypes.c_size_t(0)))


def total() -> int | None:
    """Bytes of memory of the first GPU that JAX has; None where it has none."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    handle, size = ctypes.c_int(), ctypes.c_size_t()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device.local_hardware_id))
    _check(_driver().cuDeviceTotalMem_v2(ctypes.byref(size), handle))
    return size.value


def _pools() -> list[ctypes.c_void_p]:
    """Of the GPUs that JAX has in this process; none where it does not allocate from them."""
    if os.environ.get(ALLOCATOR) != "cuda_async":
        return []
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:  # a learner in PyTorch: there is no memory of JAX's
        return []

    found = []
    for device in jax.local_devices():
        if device.platform != "gpu":
            continue
        # behind all programs: what they free is free
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
